//! Messages and descriptors over one Unix socket.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use kvferry_wire::exchange::{self, Decoder, ExchangeError, Export, Message};
use rustix::io::Errno;

use crate::socket;

/// Why a channel is of no more use, except after [`ChannelError::is_timeout`].
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
    #[error("an export came without its file descriptor")]
    NoDescriptor,
    #[error("a message that does not belong here")]
    Unexpected,
}

impl ChannelError {
    /// Nothing is lost: the answer may still come.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Socket(Errno::TIMEDOUT))
    }
}

impl From<Errno> for ChannelError {
    fn from(error: Errno) -> Self {
        match error {
            // The other side closed with something of ours unread.
            Errno::CONNRESET | Errno::PIPE => Self::Ended,
            error => Self::Socket(error),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Channel {
    socket: Arc<OwnedFd>,
    decoder: Decoder,
    /// Came with bytes of a message that is not complete yet.
    fd: Option<OwnedFd>,
}

impl Channel {
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Self {
        Self { socket, decoder: Decoder::new(), fd: None }
    }

    /// Sends a message, for an [`Export::File`] with its descriptor.
    pub(crate) fn send(
        &self,
        message: &Message,
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), ChannelError> {
        Ok(socket::send(&*self.socket, &exchange::encode(message)?, fd, deadline)?)
    }

    /// Waits without end for a message to begin, or for the connection to close.
    pub(crate) fn idle(&self) -> Result<(), ChannelError> {
        if self.decoder.is_empty() {
            socket::wait_readable(&*self.socket, None)?;
        }
        Ok(())
    }

    /// The next message, for an [`Export::File`] with its descriptor.
    pub(crate) fn receive(
        &mut self,
        deadline: Instant,
    ) -> Result<(Message, Option<OwnedFd>), ChannelError> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(message) = self.decoder.poll()? {
                if let Message::Export { export: Export::File { .. }, .. } = message {
                    let fd = self.fd.take().ok_or(ChannelError::NoDescriptor)?;
                    return Ok((message, Some(fd)));
                }
                // With bytes of a next message, it may be that one's.
                if self.fd.is_some() && self.decoder.is_empty() {
                    return Err(ChannelError::StrayDescriptor);
                }
                return Ok((message, None));
            }
            let (count, fd) = socket::receive_with_fd(&*self.socket, &mut buffer, Some(deadline))?;
            if count == 0 {
                return Err(if self.decoder.is_empty() {
                    ChannelError::Ended
                } else {
                    ChannelError::Truncated
                });
            }
            if fd.is_some() && self.fd.is_some() {
                return Err(ChannelError::StrayDescriptor);
            }
            self.fd = fd.or(self.fd.take());
            self.decoder.push(&buffer[..count]);
        }
    }
}

impl Drop for Channel {
    /// The other side and our own monitor learn of it at once, whoever else holds the socket.
    fn drop(&mut self) {
        socket::shut_down(&*self.socket);
    }
}
