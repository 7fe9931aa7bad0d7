//! Messages and descriptors over one Unix socket.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use kvferry_device::MadeBy;
use kvferry_wire::exchange::{self, Decoder, ExchangeError, MAX_DESCRIPTORS, Message};
use rustix::io::Errno;

use crate::socket::{self, Received};

/// Why a channel is of no more use, except after [`ChannelError::is_harmless`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    #[error(transparent)]
    Socket(Errno),
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error("the connection ended")]
    Ended,
    #[error("the connection ended within a message")]
    Truncated,
    #[error("a file descriptor came without a message about it")]
    StrayDescriptor,
    #[error("an export came without its file descriptors")]
    NoDescriptor,
    #[error(
        "this process has no room for the file descriptors of the memory: raise its limit (ulimit -n, RLIMIT_NOFILE) and try again"
    )]
    OutOfDescriptors {
        /// What it was an answer to.
        request: Option<u64>,
    },
    #[error(
        "too many file descriptors of this user are on their way between processes: raise the limit of the process that sends them (ulimit -n, RLIMIT_NOFILE) and try again"
    )]
    TooManyOnTheirWay,
    #[error("a message that does not belong here")]
    Unexpected,
}

impl ChannelError {
    /// The answer may still come, or the next message is where it should be.
    pub(crate) fn is_harmless(&self) -> bool {
        matches!(
            self,
            Self::Socket(Errno::TIMEDOUT) | Self::OutOfDescriptors { .. } | Self::TooManyOnTheirWay
        )
    }
}

impl From<Errno> for ChannelError {
    fn from(error: Errno) -> Self {
        match error {
            // The other side closed with something of ours unread.
            Errno::CONNRESET | Errno::PIPE => Self::Ended,
            Errno::TOOMANYREFS => Self::TooManyOnTheirWay,
            error => Self::Socket(error),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Channel {
    socket: Arc<OwnedFd>,
    decoder: Decoder,
    /// Came with the first bytes of messages that are not complete yet.
    fds: VecDeque<OwnedFd>,
    /// Some of such a message's had no room.
    lost: bool,
    /// A fork has the same connection, and does not end it.
    made_by: MadeBy,
}

impl Channel {
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Self {
        let (decoder, fds, made_by) = (Decoder::new(), VecDeque::new(), MadeBy::this_process());
        Self { socket, decoder, fds, lost: false, made_by }
    }

    /// Sends a message with its descriptors, as many as [`Message::descriptors`] says.
    pub(crate) fn send<'fd>(
        &self,
        message: &Message,
        fds: impl IntoIterator<Item = BorrowedFd<'fd>>,
        deadline: Instant,
    ) -> Result<(), ChannelError> {
        let fds: Vec<_> = fds.into_iter().collect();
        Ok(socket::send(&*self.socket, &exchange::encode(message)?, &fds, deadline)?)
    }

    /// Waits without end for a message to begin, or for the connection to close.
    pub(crate) fn idle(&self) -> Result<(), ChannelError> {
        if self.decoder.is_empty() {
            socket::wait_readable(&*self.socket, None)?;
        }
        Ok(())
    }

    /// The next message with its descriptors, as many as [`Message::descriptors`] says.
    ///
    /// # Errors
    /// After [`ChannelError::OutOfDescriptors`] the message is gone; the next one can be received.
    pub(crate) fn receive(
        &mut self,
        deadline: Instant,
    ) -> Result<(Message, Vec<OwnedFd>), ChannelError> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(message) = self.decoder.poll()? {
                let fds = self.take(&message)?;
                return Ok((message, fds));
            }
            let Received { count, fds, lost } =
                socket::receive_with_fds(&*self.socket, &mut buffer, Some(deadline))?;
            if count == 0 {
                return Err(if self.decoder.is_empty() {
                    ChannelError::Ended
                } else {
                    ChannelError::Truncated
                });
            }
            // Those of the message that ends in these bytes, and of the one that begins in them.
            if self.fds.len() > MAX_DESCRIPTORS {
                return Err(ChannelError::StrayDescriptor);
            }
            self.fds.extend(fds);
            self.lost |= lost;
            self.decoder.push(&buffer[..count]);
        }
    }

    /// The descriptors of a message that is complete, so they are there.
    fn take(&mut self, message: &Message) -> Result<Vec<OwnedFd>, ChannelError> {
        let count = message.descriptors();
        if count > self.fds.len() {
            // Those that had room are of this message.
            self.fds.clear();
            return Err(match std::mem::take(&mut self.lost) {
                true => ChannelError::OutOfDescriptors { request: message.request() },
                false => ChannelError::NoDescriptor,
            });
        }
        let taken = self.fds.drain(..count).collect();
        // With bytes of a next message, the rest may be that one's.
        if self.decoder.is_empty() && (!self.fds.is_empty() || self.lost) {
            return Err(ChannelError::StrayDescriptor);
        }
        Ok(taken)
    }
}

impl Drop for Channel {
    /// The other side and our own monitor learn of it at once, whoever else holds the socket.
    fn drop(&mut self) {
        if self.made_by.is_this_process() {
            socket::shut_down(&*self.socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::time::Duration;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    #[test]
    fn a_message_and_its_descriptors_arrive_whole_however_its_bytes_are_split() {
        let soon = || Instant::now() + Duration::from_secs(10);
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = [file.as_fd(); 3];
        let message = Message::Chunks { request: 7, lengths: vec![1, 2, 3] };
        let next = Message::Refused { request: None, reason: "next".into() };
        let bytes = exchange::encode(&message).unwrap();
        for split in 1..=bytes.len() {
            let (ours, theirs) = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::STREAM,
                SocketFlags::CLOEXEC,
                None,
            )
            .unwrap();
            let mut channel = Channel::new(Arc::new(ours));
            // Twice, so that the end of one comes with the beginning of the next.
            for _ in 0..2 {
                socket::send(&theirs, &bytes[..split], &fds, soon()).unwrap();
                socket::send(&theirs, &bytes[split..], &[], soon()).unwrap();
            }
            socket::send(&theirs, &exchange::encode(&next).unwrap(), &[], soon()).unwrap();
            for _ in 0..2 {
                let (found, fds) = channel.receive(soon()).unwrap();
                assert_eq!((&found, fds.len()), (&message, 3), "split at byte {split}");
            }
            assert_eq!(channel.receive(soon()).unwrap().0, next, "split at byte {split}");
        }
    }
}
