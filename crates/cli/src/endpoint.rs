//! The metrics of this process, for Prometheus: one page over HTTP.
//!
//! The recorder and its text are metrics-exporter-prometheus's. Its own server is not used: that
//! does not tell which port it got, knows no deadlines, and takes an HTTP library with it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::Failure;

/// Upper bounds of the histogram's buckets, in seconds: each twice the one before, from what the
/// smallest batch takes to what nobody should wait for.
const BUCKETS: [f64; 21] = [
    4e-6, 8e-6, 16e-6, 32e-6, 64e-6, 128e-6, 256e-6, 512e-6, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3,
    64e-3, 128e-3, 256e-3, 512e-3, 1.0, 4.0, 16.0,
];

/// How long a client may take to ask, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest request that is read.
const REQUEST: usize = 8 << 10;

/// How long it rests after an error that will not go away by asking again.
const REST: Duration = Duration::from_millis(100);

/// How often values that wait in histograms are added up if nobody asks.
const UPKEEP: u16 = 5_000;

/// Makes this process's metrics go to Prometheus. Before any engine is made: handles that were made
/// earlier count nowhere.
pub(crate) fn install() -> Result<PrometheusHandle, Failure> {
    let name = Matcher::Full("kvferry_batch_seconds".into());
    Ok(PrometheusBuilder::new().set_buckets_for_metric(name, &BUCKETS)?.install_recorder()?)
}

/// Serves the page at an address until the process ends, and returns the address. `before` is called
/// before each answer, to set what is no count.
pub(crate) fn serve(
    address: SocketAddr,
    handle: PrometheusHandle,
    before: impl Fn() + Send + 'static,
) -> Result<SocketAddr, Failure> {
    let refused = |error| format!("cannot listen for Prometheus on {address}: {error}");
    let listener = TcpListener::bind(address).map_err(refused)?;
    let bound = listener.local_addr().map_err(refused)?;
    if !bound.ip().is_loopback() {
        tracing::warn!(%bound, "whoever reaches this address can read the metrics");
    }
    std::thread::Builder::new().name("kvferry-metrics".into()).spawn(move || {
        loop {
            let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, PollTimeout::from(UPKEEP)) == Ok(0) {
                handle.run_upkeep();
                continue;
            }
            let (stream, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely; asking again at once would spin.
                    tracing::warn!(%error, "cannot accept a scrape, trying again");
                    std::thread::sleep(REST);
                    continue;
                }
            };
            let page = || {
                before();
                handle.render()
            };
            if let Err(error) = answer(stream, page) {
                tracing::debug!(%from, %error, "a scrape failed");
            }
        }
    })?;
    Ok(bound)
}

/// A port on the loopback address, or `host:port`.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    let wrong = |reason: String| format!("{reason}; write a port, host:port or [v6]:port");
    let mut addresses = text.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    addresses.next().ok_or_else(|| wrong("the host has no address".into()))
}

fn answer(mut stream: TcpStream, page: impl FnOnce() -> String) -> std::io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let asked = request(&mut stream)?;
    let mut words = asked.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split('?').next().unwrap_or_default();
    let (status, body) = match (method, path) {
        ("GET", "/metrics") => ("200 OK", page()),
        ("GET", _) => ("404 Not Found", "the metrics are at /metrics\n".into()),
        _ => ("405 Method Not Allowed\r\nAllow: GET", String::new()),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// The first line of a request that was read to its end.
fn request(stream: &mut TcpStream) -> std::io::Result<String> {
    let deadline = Instant::now() + PATIENCE;
    let (mut bytes, mut count) = ([0; REQUEST], 0);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[count..])? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            more => count += more,
        }
        if bytes[..count].windows(4).any(|end| end == b"\r\n\r\n") {
            let line = bytes[..count].split(|&byte| byte == b'\r').next().unwrap_or_default();
            return Ok(String::from_utf8_lossy(line).into_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_the_loopback_address() {
        assert_eq!(address("9090"), Ok("127.0.0.1:9090".parse().expect("good")));
        assert_eq!(address("0.0.0.0:1"), Ok("0.0.0.0:1".parse().expect("good")));
        for wrong in ["", "65536", "nowhere", "::1", "127.0.0.1"] {
            let error = address(wrong).expect_err(wrong);
            assert!(error.contains("write a port"), "{error}");
        }
    }

    /// What a client is answered that sends so much and closes its sending half.
    fn answered(sent: &[u8]) -> String {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let mut client = TcpStream::connect(listener.local_addr().expect("bound")).expect("open");
        client.write_all(sent).expect("sent");
        client.shutdown(std::net::Shutdown::Write).expect("open");
        let (server, _) = listener.accept().expect("connected");
        let _ = answer(server, || "a_metric 1\n".into());
        let mut text = String::new();
        // Reset where more was sent than read.
        let _ = client.read_to_string(&mut text);
        text
    }

    #[test]
    fn what_is_no_request_for_metrics_is_told_so_or_dropped() {
        assert!(answered(b"GET /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\na_metric 1\n"));
        assert!(answered(b"GET /metrics?x=1 HTTP/1.0\r\nA: b\r\n\r\n").starts_with("HTTP/1.1 200"));
        assert!(answered(b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(answered(b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert!(answered(b"\r\n\r\n").starts_with("HTTP/1.1 405"));
        for broken in [&b""[..], b"GET /metrics HTTP/1.1\r\n", &[b'A'; 2 * REQUEST]] {
            assert_eq!(answered(broken), "");
        }
    }
}
