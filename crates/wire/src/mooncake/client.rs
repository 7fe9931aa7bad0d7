use super::{
    Collected, Departing, HEADER_LENGTH, Header, Incoming, Op, Outgoing, Progress, STATUS_LENGTH,
    Status, Version,
};

/// The client's side of one operation. A connection whose operation ended well carries the next one.
///
/// Both directions go on at once: a server may reject a WRITE whose payload is still being sent. When
/// [`outcome`](Self::outcome) says how it ended, nothing more is read from the source or written to
/// the destination; after an error the connection is to be closed.
///
/// Tell [`sent`](Self::sent) before [`received`](Self::received) of what happened since: a status
/// that seems to be faster than its payload is an error.
///
/// Nothing is ever read past the operation's own bytes, so a connection with bytes to read between
/// operations is one that its server has given up: close it, and take another.
#[derive(Debug)]
pub struct Client {
    header: Header,
    sending: Sending,
    receiving: Receiving,
    outcome: Option<Result<(), ClientError>>,
}

#[derive(Clone, Copy, Debug)]
enum Sending {
    Header(Departing<HEADER_LENGTH>),
    Payload(Progress),
    Nothing,
}

#[derive(Clone, Copy, Debug)]
enum Receiving {
    Status(Collected<STATUS_LENGTH>),
    Payload(Progress),
    Nothing,
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The bytes are not inside one region that the server has registered.
    #[error("the peer rejected {length} bytes at {addr:#x}: not inside one registered region")]
    Rejected {
        /// First byte.
        addr: u64,
        /// Bytes.
        length: u64,
    },
    /// The status has a code that this code does not know.
    #[error("the peer answered with unknown code {code}")]
    UnknownCode {
        /// The code.
        code: u32,
    },
    /// What should be a status is none.
    #[error(
        "the peer sent {word:#018x} instead of a status: it may speak version 1, \
         whose descriptor has no tcp_proto_version"
    )]
    NoStatus {
        /// What it sent.
        word: u64,
    },
    /// The status came before all of the payload was sent.
    #[error("the peer confirmed a write of which {left} bytes were not sent yet")]
    EarlyStatus {
        /// Bytes not sent.
        left: u64,
    },
    /// The server closed the connection, which in version 1 is how it rejects an address.
    #[error("the peer closed the connection before the end: {length} bytes at {addr:#x}")]
    Truncated {
        /// First byte.
        addr: u64,
        /// Bytes.
        length: u64,
    },
}

impl Client {
    /// Begins an operation. One of no bytes is done at once: servers reject it.
    pub fn new(header: Header) -> Self {
        if header.length == 0 {
            let (sending, receiving) = (Sending::Nothing, Receiving::Nothing);
            return Self { header, sending, receiving, outcome: Some(Ok(())) };
        }
        let receiving = match (header.op, header.version) {
            (_, Version::V2) => Receiving::Status(Collected::EMPTY),
            (Op::Read, Version::V1) => Receiving::Payload(Progress::new(header.length)),
            (Op::Write, Version::V1) => Receiving::Nothing,
        };
        let sending = Sending::Header(Departing::new(header.encode()));
        Self { header, sending, receiving, outcome: None }
    }

    /// What is sent next.
    pub fn outgoing(&self) -> Outgoing<'_> {
        match &self.sending {
            Sending::Header(header) => Outgoing::Framing(header.rest()),
            Sending::Payload(progress) => Outgoing::Payload(progress.payload()),
            Sending::Nothing => Outgoing::Nothing,
        }
    }

    /// Says that so many bytes of what [`outgoing`](Self::outgoing) says were sent.
    pub fn sent(&mut self, count: u64) {
        match &mut self.sending {
            Sending::Header(header) => {
                if header.sent(usize::try_from(count).unwrap_or(usize::MAX)) {
                    self.sending = match self.header.op {
                        Op::Read => Sending::Nothing,
                        Op::Write => Sending::Payload(Progress::new(self.header.length)),
                    };
                }
            }
            Sending::Payload(progress) => {
                if progress.moved(count) {
                    self.sending = Sending::Nothing;
                    // Version 1 has no other word for it.
                    if self.header.version == Version::V1 {
                        self.end(Ok(()));
                    }
                }
            }
            Sending::Nothing => {}
        }
    }

    /// What the next received bytes are. In version 1, a WRITE receives nothing.
    pub fn incoming(&self) -> Incoming {
        match &self.receiving {
            Receiving::Status(status) => Incoming::Framing(status.missing()),
            Receiving::Payload(progress) => Incoming::Payload(progress.payload()),
            Receiving::Nothing => Incoming::Nothing,
        }
    }

    /// Takes bytes of the framing and says how many it took; the rest is payload.
    pub fn received(&mut self, bytes: &[u8]) -> usize {
        let Receiving::Status(status) = &mut self.receiving else { return 0 };
        let taken = status.take(bytes);
        if status.missing() == 0 {
            let bytes = status.bytes;
            self.answered(bytes);
        }
        taken
    }

    /// Says that so many bytes of the payload were read.
    pub fn received_payload(&mut self, count: u64) {
        if let Receiving::Payload(progress) = &mut self.receiving
            && progress.moved(count)
        {
            self.end(Ok(()));
        }
    }

    /// Says that the server will send no more, or that the connection broke.
    pub fn received_end(&mut self) {
        let Header { addr, length, .. } = self.header;
        self.end(Err(ClientError::Truncated { addr, length }));
    }

    /// How it ended; none while it goes on.
    pub fn outcome(&self) -> Option<Result<(), ClientError>> {
        self.outcome
    }

    fn answered(&mut self, bytes: [u8; STATUS_LENGTH]) {
        let Header { op, addr, length, .. } = self.header;
        match (Status::decode(bytes), op, &self.sending) {
            (None, ..) => {
                self.end(Err(ClientError::NoStatus { word: u64::from_le_bytes(bytes) }));
            }
            (Some(Status::AddressRejected), ..) => {
                self.end(Err(ClientError::Rejected { addr, length }));
            }
            (Some(Status::Other(code)), ..) => self.end(Err(ClientError::UnknownCode { code })),
            (Some(Status::Done), Op::Write, Sending::Nothing) => self.end(Ok(())),
            (Some(Status::Done), Op::Read, Sending::Nothing) => {
                self.receiving = Receiving::Payload(Progress::new(length));
            }
            (Some(Status::Done), _, Sending::Header(_)) => {
                self.end(Err(ClientError::EarlyStatus { left: length }));
            }
            (Some(Status::Done), _, Sending::Payload(progress)) => {
                let left = progress.payload().left;
                self.end(Err(ClientError::EarlyStatus { left }));
            }
        }
    }

    fn end(&mut self, outcome: Result<(), ClientError>) {
        self.outcome.get_or_insert(outcome);
        (self.sending, self.receiving) = (Sending::Nothing, Receiving::Nothing);
    }
}
