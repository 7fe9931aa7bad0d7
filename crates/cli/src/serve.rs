//! A node that lets peers, stock Mooncake among them, read and write a piece of memory.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use kvferry_engine::{Config, DeviceName, Engine, open_device};
use kvferry_node::{Node, NodeOptions};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use serde::Serialize;

use crate::{Failure, endpoint};

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Where peers ask for the descriptor: host:port or [v6]:port; port 0 takes any free one, and
    /// [::] is every address of this host. Data goes over other ports of the same address
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen: String,
    /// What peers open, where that is not the address listened on; port 0 stands for its port
    #[arg(long, value_name = "HOST:PORT")]
    name: Option<String>,
    /// Bytes to allocate and register (suffixes K, M, G)
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory: u64,
    /// Whose memory: host, cuda:N or rocm:N
    #[arg(long, default_value = "host")]
    device: DeviceName,
    /// Metrics for Prometheus at http://HOST:PORT/metrics; a port alone is one of the loopback
    /// address, and port 0 takes any free one. Whoever reaches it can read them
    #[arg(long, value_name = "HOST:PORT", value_parser = endpoint::address)]
    metrics: Option<SocketAddr>,
    /// Write the line that says where the memory is to this file, too; it is removed at the end
    #[arg(long, value_name = "FILE")]
    segment_file: Option<PathBuf>,
}

/// What is printed once peers can open the node.
#[derive(Debug, Serialize)]
struct Ready<'a> {
    /// What peers open.
    name: &'a str,
    /// First byte of the registered memory, as peers name it.
    address: u64,
    /// Bytes of it.
    length: u64,
    /// Where Mooncake's TCP transport listens; null if it is refused.
    data_port: Option<u16>,
    device: String,
    /// Where Prometheus asks for metrics; null if nowhere.
    metrics: Option<SocketAddr>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    // Before there are other threads, so that none of them takes a signal.
    let signals = signals()?;
    let config = Config::from_env()?;
    // Before the engine, so that all it counts is there.
    let recorder = options.metrics.map(|_| endpoint::install()).transpose()?;
    let (listen, host) = resolve(&options.listen)?;
    // A host's name stays what peers open, an address says it by itself.
    let name = options.name.clone().or_else(|| host.map(|host| format!("{host}:0")));
    let device = open_device(options.device, &config)?;
    let engine = Engine::new(config, vec![Arc::clone(&device)])?;
    let buffer = engine.allocate(&device, options.memory)?;
    // Peers that reach the one port reach the others.
    let batch_listen = Some(SocketAddr::new(listen.ip(), 0));
    let node_options = NodeOptions { listen, name, batch_listen, ..NodeOptions::default() };
    let node = Node::start(Arc::clone(&engine), &node_options)?;

    let metrics = match (options.metrics, recorder) {
        (Some(address), Some(recorder)) => {
            let engine = Arc::downgrade(&engine);
            let gauges = move || engine.upgrade().iter().for_each(|engine| set_gauges(engine));
            Some(endpoint::serve(address, recorder, gauges)?)
        }
        _ => None,
    };

    let ready = Ready {
        name: node.name(),
        address: buffer.addr(),
        length: buffer.len(),
        data_port: node.data_port(),
        device: device.info().to_string(),
        metrics,
    };
    let line = serde_json::to_string(&ready)? + "\n";
    let _file = options.segment_file.as_deref().map(|path| SegmentFile::write(path, &line));
    let _file = _file.transpose()?;
    let mut output = std::io::stdout();
    output.write_all(line.as_bytes())?;
    output.flush()?;
    wait(&signals)
}

/// What is so now, and is no count.
fn set_gauges(engine: &Engine) {
    let registered: u64 = engine.segment().regions.iter().map(|region| region.len).sum();
    metrics::gauge!("kvferry_registered_bytes").set(registered as f64);
    metrics::gauge!("kvferry_pinned_bytes").set(engine.pinned_account().used() as f64);
}

/// Blocks the signals that end a server, and makes them readable.
fn signals() -> Result<SignalFd, Failure> {
    let ending = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    ending.thread_block()?;
    Ok(SignalFd::with_flags(&ending, SfdFlags::SFD_CLOEXEC)?)
}

/// Returns at a signal, or when standard input closes. One that never was open, `/dev/null`, does
/// not close.
fn wait(signals: &SignalFd) -> Result<(), Failure> {
    let mut input = std::io::stdin().lock();
    let mut watch_input = !is_null_device(&input);
    loop {
        let mut fds = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        if watch_input {
            fds.push(PollFd::new(input.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut fds, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            other => other?,
        };
        let happened = |fd: &PollFd<'_>| fd.any().unwrap_or(true);
        let (signal, typed) = (happened(&fds[0]), fds.get(1).is_some_and(happened));
        if signal {
            return Ok(());
        }
        if typed {
            match input.read(&mut [0; 4096]) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                // A terminal that this process may not read: signals are left.
                Err(_) => watch_input = false,
            }
        }
    }
}

fn is_null_device(input: impl AsFd) -> bool {
    let null = nix::sys::stat::stat("/dev/null").map(|null| null.st_rdev);
    let this = nix::sys::stat::fstat(input).map(|this| this.st_rdev);
    null.is_ok_and(|null| this == Ok(null))
}

/// The file with the line, while the node runs.
struct SegmentFile<'a>(&'a Path);

impl<'a> SegmentFile<'a> {
    /// Whole or not at all: whoever waits for the file never reads half a line.
    fn write(path: &'a Path, line: &str) -> Result<Self, Failure> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".{}", std::process::id()));
        let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
        std::fs::write(&partial, line).map_err(failed)?;
        std::fs::rename(&partial, path).map_err(failed)?;
        Ok(Self(path))
    }
}

impl Drop for SegmentFile<'_> {
    fn drop(&mut self) {
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(self.0);
    }
}

/// The address to listen on, and the host if it is given by name.
fn resolve(listen: &str) -> Result<(SocketAddr, Option<&str>), Failure> {
    let unusable = |reason: &dyn std::fmt::Display| {
        format!("cannot listen on {listen:?}: {reason}; write host:port or [v6]:port")
    };
    let mut addresses = listen.to_socket_addrs().map_err(|error| unusable(&error))?;
    let address = addresses.next().ok_or_else(|| unusable(&"the host has no address"))?;
    let host = listen.rsplit_once(':').map(|(host, _)| host);
    Ok((address, host.filter(|host| !host.starts_with('[') && host.parse::<IpAddr>().is_err())))
}

fn bytes(text: &str) -> Result<u64, String> {
    let suffixes = [('K', 10), ('M', 20), ('G', 30)];
    let (digits, shift) = suffixes
        .into_iter()
        .find_map(|(suffix, shift)| Some((text.strip_suffix(suffix)?, shift)))
        .unwrap_or((text, 0));
    let number =
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u64>().ok());
    let bytes = number.flatten().and_then(|number| number.checked_mul(1 << shift));
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| "expected bytes, such as 4096, 64M or 2G".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_or_refused() {
        for (text, size) in [("1", 1), ("64M", 64 << 20), ("2G", 2 << 30), ("4K", 4096)] {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        for text in ["", "0", "-1", "+1", "1.5G", "64MB", "M", "17179869185G", "1 G"] {
            bytes(text).expect_err(text);
        }
    }

    #[test]
    fn a_host_by_name_stays_the_name_and_an_address_does_not() {
        let host = |listen| resolve(listen).map(|(_, host)| host.map(str::to_owned)).ok().flatten();
        assert_eq!(host("localhost:0"), Some("localhost".into()));
        for address in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:5"] {
            assert_eq!(host(address), None, "{address}");
        }
        for wrong in ["", "nowhere", "127.0.0.1:x", "127.0.0.1:65536", "::1"] {
            let error = resolve(wrong).expect_err(wrong).to_string();
            assert!(error.contains(&format!("{wrong:?}")), "{error}");
        }
    }
}
