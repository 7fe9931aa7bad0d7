//! Sockets of an address, as the engine and the node make them.

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::net::{TcpStream, ToSocketAddrs, lookup_host};
use tokio::time::{Instant, timeout};

/// Listens on an address, without blocking: the port is taken from here on, and `[::]` is every
/// address of both families, whatever the system's default is (`net.ipv6.bindv6only`).
///
/// # Errors
/// The system's, as for an address that is taken or not this host's.
pub fn listen(address: SocketAddr) -> Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // A port whose old connections linger is free; one that somebody listens on is not.
    set_socket_reuseaddr(&socket, true)?;
    if address.ip().is_unspecified() && address.is_ipv6() {
        set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, 1024)?;
    Ok(socket.into())
}

/// Connects to the first address of a name that answers. Each has its part of the time, so that one that
/// says nothing leaves some to those behind it.
///
/// # Errors
/// `TimedOut`, or the last address's.
pub async fn connect(name: impl ToSocketAddrs, time: Duration) -> Result<TcpStream> {
    let deadline = Instant::now() + time;
    let late = |_| Error::from(ErrorKind::TimedOut);
    let found: Vec<_> = timeout(time, lookup_host(name)).await.map_err(late)??.collect();
    let mut failure = Error::new(ErrorKind::NotFound, "the name has no address");
    for (at, address) in found.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let part = left / (found.len() - at) as u32;
        match timeout(part, TcpStream::connect(address)).await.map_err(late).flatten() {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream as Blocking;

    use kvferry_device::conformance::skip;
    use rustix::net::sockopt::ipv6_v6only;
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    use super::*;

    #[test]
    fn every_address_is_one_of_both_families_whatever_the_systems_default() {
        // The default is a network namespace's, and a thread may have its own.
        let found = std::thread::spawn(|| {
            // SAFETY: files and memory stay shared with the other threads.
            if let Err(error) = unsafe { unshare_unsafe(UnshareFlags::NEWNET) } {
                return skip("network-namespace", &error);
            }
            if let Err(error) = std::fs::write("/proc/sys/net/ipv6/bindv6only", "1") {
                return skip("network-namespace", &error);
            }
            let listener = listen("[::]:0".parse().unwrap()).unwrap();
            assert!(!ipv6_v6only(&listener).unwrap());
        });
        found.join().unwrap();
    }

    #[tokio::test]
    async fn an_address_that_says_nothing_leaves_time_to_the_next_one() {
        // Nobody accepts: once the queue is full the system drops what asks for a connection.
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let deaf = TcpListener::from(socket);
        let silent = deaf.local_addr().unwrap();
        let moment = Duration::from_millis(200);
        let mut queue = Vec::new();
        while let Ok(stream) = Blocking::connect_timeout(&silent, moment) {
            queue.push(stream);
        }
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let answers = listener.local_addr().unwrap();
        let began = Instant::now();
        let found = connect(&[silent, answers][..], Duration::from_secs(2)).await.unwrap();
        assert_eq!(found.peer_addr().unwrap(), answers);
        assert!(began.elapsed() < Duration::from_millis(1900), "all of the time is used up");
        let error = connect(&[silent][..], moment).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }
}
