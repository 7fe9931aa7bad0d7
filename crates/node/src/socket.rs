//! Sockets with deadlines. No call here blocks past its deadline, and none raises SIGPIPE.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, Result};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use kvferry_wire::exchange::MAX_DESCRIPTORS;

use crate::address::Address;
use crate::error::NodeError;

/// How long connecting, and each half of an exchange, may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Wakes a thread that polls, from any other.
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    pub(crate) fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    pub(crate) fn raise(&self) {
        // It fails only when the counter is full, and then the wake is already there.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes back all raises so far.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of `fds` has what it is polled for, or an error.
///
/// # Errors
/// `TIMEDOUT` at the deadline.
pub(crate) fn wait(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<()> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout =
            left.map(|left| Timespec::try_from(left).map_err(|_| Errno::INVAL)).transpose()?;
        match poll(fds, timeout.as_ref()) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Waits until a read would not block.
pub(crate) fn wait_readable(socket: impl AsFd, deadline: Option<Instant>) -> Result<()> {
    wait(&mut [PollFd::new(&socket, PollFlags::IN)], deadline)
}

/// Reads what is there, at least one byte; 0 at the end of the stream.
pub(crate) fn receive(socket: impl AsFd, buffer: &mut [u8], deadline: Instant) -> Result<usize> {
    retry(&socket, PollFlags::IN, Some(deadline), || {
        rustix::net::recv(&socket, &mut *buffer, RecvFlags::DONTWAIT).map(|(_, count)| count)
    })
}

/// What [`receive_with_fds`] got.
#[derive(Debug)]
pub(crate) struct Received {
    /// Bytes; 0 at the end of the stream.
    pub(crate) count: usize,
    /// The descriptors that came with the last of the bytes.
    pub(crate) fds: Vec<OwnedFd>,
    /// More came, and this process had no room for them: they are closed.
    pub(crate) lost: bool,
}

/// [`receive`] from a Unix socket, with the descriptors that came along. More than
/// [`MAX_DESCRIPTORS`] of them are an error.
pub(crate) fn receive_with_fds(
    socket: impl AsFd,
    buffer: &mut [u8],
    deadline: Option<Instant>,
) -> Result<Received> {
    retry(&socket, PollFlags::IN, deadline, || {
        // One more than there may be, so that too many are told from too little room.
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received =
            rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags)?;
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds: Vec<OwnedFd> = rights.flatten().collect();
        if fds.len() > MAX_DESCRIPTORS {
            return Err(Errno::PROTO);
        }
        let lost = received.flags.contains(ReturnFlags::CTRUNC);
        Ok(Received { count: received.bytes, fds, lost })
    })
}

/// Sends all of `bytes`; the descriptors, [`MAX_DESCRIPTORS`] at most, go with the first of them.
///
/// # Errors
/// `TOOMANYREFS` if too many descriptors of this user are on their way; then nothing was sent.
pub(crate) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut sent = 0;
    while sent < bytes.len() {
        let left = [IoSlice::new(&bytes[sent..])];
        let fds = if sent == 0 { fds } else { &[] };
        sent += retry(&socket, PollFlags::OUT, Some(deadline), || {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(Errno::NOBUFS);
            }
            rustix::net::sendmsg(&socket, &left, &mut ancillary, flags)
        })?;
    }
    Ok(())
}

/// Ends the connection for both sides and for every thread that waits on it.
pub(crate) fn shut_down(socket: impl AsFd) {
    // It fails if the other side was faster.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Connects to the first of the host's addresses that answers. Each has its part of the time, so that
/// one that says nothing leaves some to those behind it.
pub(crate) fn connect_tcp(address: &Address, deadline: Instant) -> std::io::Result<OwnedFd> {
    let found: Vec<_> = (address.host.as_str(), address.port).to_socket_addrs()?.collect();
    connect_first(&found, deadline).map(Into::into)
}

fn connect_first(found: &[SocketAddr], deadline: Instant) -> std::io::Result<TcpStream> {
    let mut failure = std::io::Error::new(std::io::ErrorKind::NotFound, "the host has no address");
    for (at, address) in found.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        match connect_one(address, left / (found.len() - at) as u32) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Connects to an abstract Unix socket of this network namespace.
pub(crate) fn connect_unix(name: &str) -> Result<OwnedFd> {
    let socket = unix_socket(SocketFlags::CLOEXEC)?;
    // Connecting blocks while the other side's backlog is full, but no longer than a send may.
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(Errno::TIMEDOUT),
            Err(error) => return Err(error),
        }
    }
}

/// Listens on an abstract Unix socket, which leaves nothing behind however the process ends.
pub(crate) fn listen_unix(name: &str) -> Result<OwnedFd> {
    let socket = unix_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Checks that the other end of a Unix socket is this user's.
///
/// By nix, since rustix 1.1 cannot say it of a peer in a sibling PID namespace: the process id is 0
/// there, which its `Pid` has no room for.
pub(crate) fn same_user(socket: impl AsFd) -> std::result::Result<(), NodeError> {
    let theirs = nix::sys::socket::getsockopt(&socket, nix::sys::socket::sockopt::PeerCredentials)
        .map_err(|error| NodeError::system("SO_PEERCRED", error))?;
    check_user(rustix::process::geteuid().as_raw(), theirs.uid())
}

fn check_user(ours: u32, theirs: u32) -> std::result::Result<(), NodeError> {
    if ours == theirs { Ok(()) } else { Err(NodeError::OtherUser { ours, theirs }) }
}

fn unix_socket(flags: SocketFlags) -> Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

fn connect_one(address: &SocketAddr, time: Duration) -> std::io::Result<TcpStream> {
    if time.is_zero() {
        return Err(std::io::ErrorKind::TimedOut.into());
    }
    TcpStream::connect_timeout(address, time)
}

/// Repeats `call`, which does not block, until it has an answer. The deadline holds also if the
/// call always has something to do, and so for calls in a row whose peer never stops talking.
fn retry<R>(
    socket: &impl AsFd,
    events: PollFlags,
    deadline: Option<Instant>,
    mut call: impl FnMut() -> Result<R>,
) -> Result<R> {
    loop {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Errno::TIMEDOUT);
        }
        wait(&mut [PollFd::new(socket, events)], deadline)?;
        match call() {
            Err(Errno::AGAIN | Errno::INTR) => {}
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};
    use std::net::TcpListener;

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + PATIENCE
    }

    #[test]
    fn a_deadline_holds_although_there_is_always_something_to_read() {
        let (here, there) = pair();
        let (soon, late) = (soon(), Instant::now());
        send(&here, b"and so on", &[], soon).unwrap();
        assert_eq!(receive(&there, &mut [0; 2], soon), Ok(2));
        assert_eq!(receive(&there, &mut [0; 2], late), Err(Errno::TIMEDOUT));
        let received = receive_with_fds(&there, &mut [0; 2], Some(late));
        assert_eq!(received.map(|received| received.count), Err(Errno::TIMEDOUT));
        assert_eq!(send(&here, b"more", &[], late), Err(Errno::TIMEDOUT));
    }

    #[test]
    fn a_descriptor_arrives_with_its_bytes_and_is_the_same_file() {
        let (here, there) = pair();
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(memory);
        file.write_all(b"page").unwrap();
        send(&here, b"frame", &[file.as_fd()], soon()).unwrap();
        let mut buffer = [0; 16];
        let Received { count, mut fds, lost } =
            receive_with_fds(&there, &mut buffer, Some(soon())).unwrap();
        assert_eq!((&buffer[..count], lost), (&b"frame"[..], false));
        let mut received = std::fs::File::from(fds.pop().expect("a descriptor"));
        assert!(fds.is_empty());
        assert!(rustix::io::fcntl_getfd(&received).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        received.rewind().unwrap();
        let mut text = String::new();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "page");
    }

    #[test]
    fn as_many_descriptors_as_a_frame_may_have_arrive_in_order_and_more_are_refused() {
        let (here, there) = pair();
        let memories: Vec<_> = (0..MAX_DESCRIPTORS + 1)
            .map(|_| rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
            .collect();
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let fds: Vec<_> = memories.iter().map(AsFd::as_fd).collect();
        send(&here, b"x", &fds[..MAX_DESCRIPTORS], soon()).unwrap();
        let received = receive_with_fds(&there, &mut [0; 4], Some(soon())).unwrap();
        let inodes = |fds: &[OwnedFd]| fds.iter().map(inode).collect::<Vec<_>>();
        assert_eq!(inodes(&received.fds), inodes(&memories[..MAX_DESCRIPTORS]));
        // The space has room for one more than it is made for.
        send(&here, b"x", &fds, soon()).unwrap();
        let refused = receive_with_fds(&there, &mut [0; 4], Some(soon())).map(|_| ());
        assert_eq!(refused, Err(Errno::PROTO));
    }

    #[test]
    fn an_address_that_says_nothing_leaves_time_to_the_next_one() {
        // Nobody accepts: once the queue is full the system drops what asks for a connection.
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &local).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let deaf = TcpListener::from(socket);
        let silent = deaf.local_addr().unwrap();
        let mut queue = Vec::new();
        while let Ok(stream) = connect_one(&silent, Duration::from_millis(200)) {
            queue.push(stream);
        }
        let listener = TcpListener::bind(local).unwrap();
        let answers = listener.local_addr().unwrap();
        let deadline = Instant::now() + Duration::from_secs(2);
        let found = connect_first(&[silent, answers], deadline).unwrap();
        assert_eq!(found.peer_addr().unwrap(), answers);
    }

    #[test]
    fn a_silent_peer_costs_no_more_than_the_deadline() {
        let (here, _there) = pair();
        let deadline = Instant::now() + Duration::from_millis(20);
        assert_eq!(receive(&here, &mut [0; 4], deadline), Err(Errno::TIMEDOUT));
        assert!(Instant::now() >= deadline);
    }

    #[test]
    fn a_peer_that_does_not_read_costs_no_more_than_the_deadline() {
        let (here, _there) = pair();
        let deadline = Instant::now() + Duration::from_millis(20);
        assert_eq!(send(&here, &vec![0; 64 << 20], &[], deadline), Err(Errno::TIMEDOUT));
    }

    #[test]
    fn sending_to_a_closed_peer_is_an_error_and_no_signal() {
        let (here, there) = pair();
        drop(there);
        assert_eq!(send(&here, b"x", &[], soon()), Err(Errno::PIPE));
    }

    #[test]
    fn only_the_same_user_passes() {
        let (here, _there) = pair();
        same_user(&here).unwrap();
        let error = check_user(1000, 1001).unwrap_err();
        assert_eq!(error, NodeError::OtherUser { ours: 1000, theirs: 1001 });
        assert!(
            error.to_string().contains("1000") && error.to_string().contains("1001"),
            "{error}"
        );
    }
}
