//! A listening socket, the thread that accepts, and one thread per connection.
//!
//! All of them are joined when the [`Service`] is dropped. No error of one connection, and none of
//! the listener, ends it earlier.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use kvferry_device::MadeBy;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::error::NodeError;
use crate::socket::{self, Wake};

/// What a connection's thread does. It waits for nothing but its socket.
pub(crate) type Handler = Arc<dyn Fn(&Arc<OwnedFd>) + Send + Sync>;

/// What happens to a new connection when all are taken.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WhenFull {
    /// The oldest one ends: connections are short, so that one most likely hangs.
    EndOldest,
    /// The new one is closed.
    Refuse,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceOptions {
    /// Of its threads.
    pub(crate) name: &'static str,
    /// Most connections at once.
    pub(crate) limit: usize,
    pub(crate) when_full: WhenFull,
}

#[derive(Debug)]
pub(crate) struct Service {
    control: Arc<Control>,
    acceptor: Option<JoinHandle<()>>,
    /// A fork has none of its threads, and what it listens on is the parent's.
    made_by: MadeBy,
}

#[derive(Debug)]
struct Control {
    /// Raised to stop, and when a connection's thread ends.
    wake: Wake,
    stop: AtomicBool,
}

impl Service {
    /// Serves `listener`, which must not block.
    pub(crate) fn start(
        listener: OwnedFd,
        options: ServiceOptions,
        handler: Handler,
    ) -> Result<Self, NodeError> {
        let wake = Wake::new().map_err(|error| NodeError::system("eventfd", error))?;
        let control = Arc::new(Control { wake, stop: AtomicBool::new(false) });
        let workers =
            Workers { control: Arc::clone(&control), options, handler, live: VecDeque::new() };
        let acceptor =
            Builder::new().name(options.name.into()).spawn(move || accept(&listener, workers));
        let acceptor = acceptor.map_err(|error| NodeError::system("starting a thread", error))?;
        Ok(Self { control, acceptor: Some(acceptor), made_by: MadeBy::this_process() })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.made_by.is_this_process() {
            return std::mem::forget(self.acceptor.take());
        }
        self.control.stop.store(true, Ordering::Release);
        self.control.wake.raise();
        // The thread ends its workers; a panic there was reported when it happened.
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

/// What the accept thread owns.
struct Workers {
    control: Arc<Control>,
    options: ServiceOptions,
    handler: Handler,
    /// The oldest first.
    live: VecDeque<Worker>,
}

struct Worker {
    /// Weak, so that the socket closes when its thread is done with it.
    socket: Weak<OwnedFd>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn end(self) {
        if let Some(socket) = self.socket.upgrade() {
            socket::shut_down(&*socket);
        }
        let _ = self.thread.join();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.live.drain(..).for_each(Worker::end);
    }
}

/// How long a listener rests after an error that will not go away by asking again.
const REST: Duration = Duration::from_millis(100);

fn accept(listener: &OwnedFd, mut workers: Workers) {
    let control = Arc::clone(&workers.control);
    let name = workers.options.name;
    while !control.stop.load(Ordering::Acquire) {
        let mut fds =
            [PollFd::new(listener, PollFlags::IN), PollFd::new(&control.wake, PollFlags::IN)];
        let accepted = socket::wait(&mut fds, None).and_then(|()| {
            control.wake.clear();
            rustix::net::accept_with(listener, SocketFlags::CLOEXEC)
        });
        workers.reap();
        match accepted {
            Ok(socket) if control.stop.load(Ordering::Acquire) => drop(socket),
            Ok(socket) => workers.start(socket),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                // Out of descriptors, most likely: the listener stays readable, so asking again at
                // once would spin. A connection that ends ends the rest.
                tracing::warn!(service = name, %error, "cannot accept connections, trying again");
                let _ = socket::wait_readable(&control.wake, Some(Instant::now() + REST));
            }
        }
    }
}

impl Workers {
    fn reap(&mut self) {
        let (done, live): (VecDeque<_>, _) =
            self.live.drain(..).partition(|worker| worker.thread.is_finished());
        self.live = live;
        done.into_iter().for_each(Worker::end);
    }

    fn start(&mut self, socket: OwnedFd) {
        let ServiceOptions { name, limit, when_full } = self.options;
        if self.live.len() >= limit {
            match when_full {
                WhenFull::EndOldest => {
                    tracing::debug!(
                        service = name,
                        limit,
                        "all connections are taken, ending the oldest"
                    );
                    self.live.pop_front().into_iter().for_each(Worker::end);
                }
                WhenFull::Refuse => {
                    tracing::debug!(
                        service = name,
                        limit,
                        "all connections are taken, refusing another"
                    );
                    return;
                }
            }
        }
        let socket = Arc::new(socket);
        let weak = Arc::downgrade(&socket);
        let (handler, control) = (Arc::clone(&self.handler), Arc::clone(&self.control));
        let spawned = Builder::new().name(name.into()).spawn(move || {
            handler(&socket);
            drop(socket);
            control.wake.raise();
        });
        match spawned {
            Ok(thread) => self.live.push_back(Worker { socket: weak, thread }),
            Err(error) => {
                tracing::warn!(service = name, %error, "no thread for a connection, closing it")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};

    /// Echoes each byte until the client closes.
    fn echo(limit: usize, when_full: WhenFull) -> (Service, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let handler: Handler = Arc::new(|socket| {
            let mut byte = [0];
            while socket::wait_readable(socket, None).is_ok()
                && socket::receive(socket, &mut byte, Instant::now() + socket::PATIENCE) == Ok(1)
            {
                let _ = socket::send(socket, &byte, &[], Instant::now() + socket::PATIENCE);
            }
        });
        let options = ServiceOptions { name: "echo", limit, when_full };
        (Service::start(listener.into(), options, handler).unwrap(), address)
    }

    fn client(address: SocketAddr) -> TcpStream {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream
    }

    fn echoes(stream: &mut TcpStream) -> bool {
        let mut byte = [0];
        stream.write_all(b"x").is_ok() && stream.read(&mut byte).is_ok_and(|count| count == 1)
    }

    #[test]
    fn the_oldest_connection_makes_room() {
        let (_service, address) = echo(2, WhenFull::EndOldest);
        let mut clients = [client(address), client(address)];
        assert!(clients.iter_mut().all(echoes));
        let mut third = client(address);
        assert!(echoes(&mut third));
        assert!(!echoes(&mut clients[0]), "the oldest one was ended");
        assert!(echoes(&mut clients[1]));
    }

    #[test]
    fn a_connection_beyond_the_limit_is_refused_until_another_ends() {
        let (_service, address) = echo(1, WhenFull::Refuse);
        let mut first = client(address);
        assert!(echoes(&mut first));
        assert!(!echoes(&mut client(address)));
        assert!(echoes(&mut first));
        drop(first);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !echoes(&mut client(address)) {
            assert!(Instant::now() < deadline, "the place was not given back");
        }
    }

    #[test]
    fn dropping_a_service_ends_its_connections() {
        let (service, address) = echo(4, WhenFull::Refuse);
        let mut idle = client(address);
        assert!(echoes(&mut idle));
        drop(service);
        assert!(!echoes(&mut idle));
        TcpStream::connect(address).expect_err("nobody listens any more");
    }
}
