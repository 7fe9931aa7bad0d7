use std::io;
use std::time::Duration;

use kvferry_wire::mooncake::{Client, HEADER_LENGTH, Incoming, Outgoing, Server};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::memory::{Memory, MoveError};

/// Payload that has to move within each [`progress`](super::progress) time: less
/// is no use to anybody, and a byte now and then is no progress.
const STRIDE: u64 = 256 << 10;

/// One end of a connection, as the protocol sees it.
pub(super) trait Session {
    fn incoming(&self) -> Incoming;
    fn received(&mut self, bytes: &[u8]) -> usize;
    fn received_payload(&mut self, count: u64);
    fn received_end(&mut self);
    fn outgoing(&self) -> Outgoing<'_>;
    fn sent(&mut self, count: u64);
}

macro_rules! sessions {
    ($($session:ty),*) => {
        $(impl Session for $session {
            fn incoming(&self) -> Incoming {
                self.incoming()
            }
            fn received(&mut self, bytes: &[u8]) -> usize {
                self.received(bytes)
            }
            fn received_payload(&mut self, count: u64) {
                self.received_payload(count);
            }
            fn received_end(&mut self) {
                self.received_end();
            }
            fn outgoing(&self) -> Outgoing<'_> {
                self.outgoing()
            }
            fn sent(&mut self, count: u64) {
                self.sent(count);
            }
        })*
    };
}

sessions!(Client, Server);

/// A connection, and when it has to have moved something.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    progress: Duration,
    deadline: Instant,
    /// Bytes since the deadline was set.
    moved: u64,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, progress: Duration) -> Self {
        // An answer of 8 bytes may not wait for more. It fails only for a socket that is gone.
        let _ = stream.set_nodelay(true);
        Self { stream, progress, deadline: Instant::now() + progress, moved: 0 }
    }

    /// Begins to measure progress.
    pub(super) fn restart(&mut self) {
        (self.deadline, self.moved) = (Instant::now() + self.progress, 0);
    }

    /// Moves what the session wants moved, both ways, and returns as soon as something was. Returns
    /// at once if it wants nothing.
    ///
    /// # Errors
    /// `TimedOut` without enough progress; what the socket or the device says. A peer that closes
    /// is no error: the session knows what it means.
    pub(super) async fn advance(
        &mut self,
        session: &mut impl Session,
        memory: Option<&mut Memory>,
    ) -> Result<(), MoveError> {
        // A socket that is always ready still takes turns with the others.
        tokio::task::consume_budget().await;
        let memory = &mut { memory };
        loop {
            let receives = session.incoming() != Incoming::Nothing;
            let sends = session.outgoing() != Outgoing::Nothing;
            // What was sent is told before what was received since.
            let sent = match sends {
                true => moved(self.send(session, memory).await),
                false => Ok(None),
            };
            let received = match receives {
                true => moved(self.receive(session, memory).await)?,
                false => None,
            };
            let sent = match sent {
                // A peer that closes has perhaps said why before.
                Err(MoveError::Socket(_)) if receives => {
                    if received.is_some() {
                        return Ok(());
                    }
                    self.ready(Interest::READABLE).await?;
                    continue;
                }
                sent => sent?,
            };
            if received.is_some() || sent.is_some() || !(receives || sends) {
                self.count(received.unwrap_or(0) + sent.unwrap_or(0));
                return Ok(());
            }
            let interest = match (receives, sends) {
                (true, true) => Interest::READABLE | Interest::WRITABLE,
                (true, false) => Interest::READABLE,
                (false, _) => Interest::WRITABLE,
            };
            self.ready(interest).await?;
        }
    }

    /// Waits, for however long, for the first bytes of an operation, or for the end. May be given up
    /// at any time: no byte is lost.
    pub(super) async fn begin(&mut self, session: &mut impl Session) -> Result<(), MoveError> {
        loop {
            // It may say so of bytes that were read before.
            self.stream.readable().await?;
            if moved(self.receive(session, &mut None).await)?.is_some() {
                self.restart();
                return Ok(());
            }
        }
    }

    async fn ready(&self, interest: Interest) -> io::Result<()> {
        let ready = timeout_at(self.deadline, self.stream.ready(interest)).await;
        ready.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?.map(drop)
    }

    async fn receive(
        &self,
        session: &mut impl Session,
        memory: &mut Option<&mut Memory>,
    ) -> Result<u64, MoveError> {
        let received = match (session.incoming(), memory) {
            (Incoming::Payload(payload), Some(memory)) => {
                let received = memory.receive(&self.stream, payload).await?;
                session.received_payload(received);
                received
            }
            (Incoming::Framing(most), _) => {
                let mut bytes = [0; HEADER_LENGTH];
                let most = most.min(bytes.len());
                let received = self.stream.try_read(&mut bytes[..most])?;
                session.received(&bytes[..received]);
                received as u64
            }
            (Incoming::Nothing, _) | (Incoming::Payload(_), None) => return Ok(0),
        };
        if received == 0 {
            session.received_end();
        }
        Ok(received)
    }

    async fn send(
        &self,
        session: &mut impl Session,
        memory: &mut Option<&mut Memory>,
    ) -> Result<u64, MoveError> {
        let sent = match (session.outgoing(), memory) {
            (Outgoing::Payload(payload), Some(memory)) => {
                memory.send(&self.stream, payload).await?
            }
            (Outgoing::Framing(bytes), _) => self.stream.try_write(bytes)? as u64,
            (Outgoing::Nothing, _) | (Outgoing::Payload(_), None) => return Ok(0),
        };
        session.sent(sent);
        Ok(sent)
    }

    fn count(&mut self, bytes: u64) {
        self.moved += bytes;
        if self.moved >= STRIDE {
            self.restart();
        }
    }
}

/// None if the socket would have to be waited for.
fn moved(result: Result<u64, MoveError>) -> Result<Option<u64>, MoveError> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(MoveError::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}
