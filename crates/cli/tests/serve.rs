//! `kvferry serve` as its users run it.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvferry_engine::{Config, Engine, Op, Path, Range, State};
use kvferry_node::{Node, NodeOptions, TransferState};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

struct Server {
    process: Child,
    ready: Value,
}

impl Server {
    fn start(arguments: &[&str], input: Stdio) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .arg("serve")
            .args(arguments)
            .stdin(input)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("a line");
        Self { process, ready: serde_json::from_str(&line).expect("JSON") }
    }

    fn text(&self, field: &str) -> &str {
        self.ready[field].as_str().expect("text")
    }

    fn number(&self, field: &str) -> u64 {
        self.ready[field].as_u64().expect("a number")
    }

    fn ends_well(mut self) {
        assert!(self.process.wait().expect("it ends").success());
    }
}

#[test]
fn memory_of_a_server_is_written_and_read_by_the_name_that_it_prints() {
    let server = Server::start(&["--memory", "1M"], Stdio::piped());
    assert_eq!(server.number("length"), 1 << 20);
    assert_eq!(server.text("device"), "host:0");
    assert!(server.text("name").starts_with("127.0.0.1:"));
    assert_ne!(server.number("data_port"), 0);

    let host = kvferry_device::host().expect("host memory");
    let engine = Engine::new(Config::default(), vec![host]).expect("an engine");
    let buffer = engine.allocate(&engine.devices()[0], 4096).expect("memory");
    let node = Node::start(Arc::clone(&engine), &NodeOptions::default()).expect("a node");
    let peer = node.open_mooncake(server.text("name")).expect("the server");
    let remote = server.number("address");
    let transfer = |op, local, len| {
        let range = Range { local: buffer.addr() + local, remote: remote + 77, len };
        peer.submit(op, &[range]).expect("a good list").wait(Duration::from_secs(20))
    };
    buffer.write(0, b"there and back").expect("inside");
    assert_eq!(transfer(Op::Write, 0, 14), TransferState::Completed);
    assert_eq!(transfer(Op::Read, 2048, 14), TransferState::Completed);
    let mut bytes = [0; 14];
    buffer.read(2048, &mut bytes).expect("inside");
    assert_eq!(&bytes, b"there and back");
}

#[test]
fn a_server_is_reached_by_the_batch_protocol_at_the_address_that_it_listens_on() {
    // Not the loopback address that a node would take by itself.
    let server = Server::start(&["--memory", "1M", "--listen", "127.0.0.2:0"], Stdio::piped());
    assert!(server.text("name").starts_with("127.0.0.2:"));
    let host = kvferry_device::host().expect("host memory");
    let mut config = Config::default();
    config.force_tcp = true;
    let engine = Engine::new(config, vec![host]).expect("an engine");
    let buffer = engine.allocate(&engine.devices()[0], 4096).expect("memory");
    let node = Node::start(Arc::clone(&engine), &NodeOptions::default()).expect("a node");
    let peer = node.open(server.text("name")).expect("the server");
    let range = Range { local: buffer.addr(), remote: server.number("address"), len: 4096 };
    let batch = engine.submit(peer.target(), Op::Write, &[range]).expect("a good list");
    let status = engine.wait(batch, Duration::from_secs(20)).expect("it ends");
    assert_eq!((status.state, status.path), (State::Completed, Path::Tcp));
}

/// What Prometheus reads at an address.
fn scrape(address: &str) -> prometheus_parse::Scrape {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kvferry\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    let lines = body.lines().map(|line| Ok(line.to_owned()));
    prometheus_parse::Scrape::parse(lines).expect("the text format")
}

#[test]
fn prometheus_reads_what_peers_moved_by_each_socket() {
    let server = Server::start(&["--memory", "1M", "--metrics", "0"], Stdio::piped());
    let host = kvferry_device::host().expect("host memory");
    let mut config = Config::default();
    config.force_tcp = true;
    let engine = Engine::new(config, vec![host]).expect("an engine");
    let buffer = engine.allocate(&engine.devices()[0], 4096).expect("memory");
    let node = Node::start(Arc::clone(&engine), &NodeOptions::default()).expect("a node");
    let range = |len| Range { local: buffer.addr(), remote: server.number("address"), len };

    let peer = node.open(server.text("name")).expect("the server");
    for (op, len) in [(Op::Write, 4000), (Op::Write, 96), (Op::Read, 1000)] {
        let batch = engine.submit(peer.target(), op, &[range(len)]).expect("a good list");
        let status = engine.wait(batch, Duration::from_secs(20)).expect("it ends");
        assert_eq!(status.state, State::Completed);
    }
    let stock = node.open_mooncake(server.text("name")).expect("the server");
    let written = stock.submit(Op::Write, &[range(14)]).expect("a good list");
    assert_eq!(written.wait(Duration::from_secs(20)), TransferState::Completed);

    // A server counts a request of Mooncake's when it is asked for the next one, or for the
    // connection's end: after it has answered, so not before the client goes on.
    let address = server.text("metrics");
    let count = |name: &str, transport: &str, direction: &str| {
        let wanted = [("transport", transport), ("direction", direction)];
        let scrape = scrape(address);
        let mut samples = scrape.samples.iter().filter(|sample| {
            sample.metric == name
                && wanted.iter().all(|(label, value)| sample.labels.get(label) == Some(value))
        });
        match samples.next().map(|sample| &sample.value) {
            Some(prometheus_parse::Value::Counter(count)) => *count,
            other => panic!("{name} of {transport} is {other:?} in {scrape:#?}"),
        }
    };
    assert_eq!(count("kvferry_served_bytes_total", "tcp", "write"), 4096.0);
    assert_eq!(count("kvferry_served_requests_total", "tcp", "write"), 2.0);
    assert_eq!(count("kvferry_served_bytes_total", "tcp", "read"), 1000.0);
    let read = stock.submit(Op::Read, &[range(14)]).expect("a good list");
    assert_eq!(read.wait(Duration::from_secs(20)), TransferState::Completed);
    assert_eq!(count("kvferry_served_bytes_total", "mooncake", "write"), 14.0);
    let registered = scrape(address);
    let mut gauges = registered.samples.iter().filter(|it| it.metric == "kvferry_registered_bytes");
    let gauge = gauges.next().map(|sample| &sample.value);
    assert!(matches!(gauge, Some(prometheus_parse::Value::Gauge(bytes)) if *bytes == 1048576.0));
    assert!(registered.docs.contains_key("kvferry_served_bytes_total"), "it says what it is");
}

#[test]
fn metrics_are_served_on_the_loopback_address_and_only_if_asked_for() {
    let server = Server::start(&["--memory", "4096"], Stdio::piped());
    assert_eq!(server.ready["metrics"], Value::Null);
    let server = Server::start(&["--memory", "4096", "--metrics", "0"], Stdio::piped());
    assert!(server.text("metrics").starts_with("127.0.0.1:"), "{}", server.ready);
}

/// Starts a server with a key, and says which data port it prints and what it says beside that.
fn with_key(knobs: &[(&str, &str)]) -> (Value, String) {
    let directory = tempfile::tempdir().expect("a folder");
    let key = directory.path().join("key");
    std::fs::write(&key, [7; 32]).expect("written");
    std::fs::set_permissions(&key, Permissions::from_mode(0o600)).expect("ours");
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["serve", "--memory", "4096"])
        .env("MC_KVFERRY_AUTH_KEY_FILE", &key)
        .envs(knobs.iter().copied())
        // It ends at once: its input is over.
        .stdin(Stdio::piped())
        .output()
        .expect("the command starts");
    let ready: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    (ready["data_port"].clone(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_key_closes_mooncakes_port_unless_the_user_opens_it_and_both_are_said() {
    let (port, said) = with_key(&[]);
    assert_eq!(port, Value::Null);
    assert!(said.contains("MC_KVFERRY_MOONCAKE=on opens it"), "{said}");
    let (port, said) = with_key(&[("MC_KVFERRY_MOONCAKE", "on")]);
    assert!(port.is_number());
    assert!(said.contains("without the key"), "{said}");
    let (port, said) = with_key(&[("MC_KVFERRY_MOONCAKE", "off")]);
    assert_eq!((port, said.as_str()), (Value::Null, ""), "as the user said");
}

#[test]
fn a_server_ends_when_its_input_closes_or_it_is_told_and_leaves_no_file() {
    let directory = tempfile::tempdir().expect("a folder");
    let path = directory.path().join("segment.json");
    let arguments = ["--memory", "4096", "--segment-file", path.to_str().expect("text")];
    for signal in [None, Some(Signal::SIGTERM), Some(Signal::SIGINT)] {
        let input = if signal.is_some() { Stdio::null() } else { Stdio::piped() };
        let mut server = Server::start(&arguments, input);
        let written = std::fs::read(&path).expect("a file");
        assert_eq!(serde_json::from_slice::<Value>(&written).expect("JSON"), server.ready);
        match signal {
            None => drop(server.process.stdin.take()),
            Some(signal) => {
                let id = Pid::from_raw(server.process.id() as i32);
                kill(id, signal).expect("it runs, although its input is empty");
            }
        }
        server.ends_well();
        assert_eq!(std::fs::read_dir(&directory).expect("a folder").count(), 0);
    }
}

#[test]
fn what_cannot_be_served_is_said_in_one_line() {
    let first = Server::start(&["--memory", "4096"], Stdio::piped());
    let taken = first.text("name").to_owned();
    for (arguments, said) in [
        (vec!["--memory", "4096", "--listen", &taken], "cannot listen on"),
        (vec!["--memory", "4096", "--listen", "0.0.0.0:0"], "needs a name"),
        (vec!["--memory", "4096", "--listen", "nowhere"], "nowhere"),
        (vec!["--memory", "4096", "--metrics", &taken], "cannot listen for Prometheus"),
        (vec!["--memory", "4096", "--metrics", "nowhere"], "write a port"),
        (vec!["--memory", "0"], "expected bytes"),
        (vec!["--memory", "1G", "--device", "gpu"], "expected host, cuda:N or rocm:N"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        let output = command.arg("serve").args(&arguments).output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(said), "{arguments:?}: {text}");
        assert_eq!(output.stdout, b"");
    }
}
