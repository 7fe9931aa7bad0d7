use super::{
    Collected, Departing, HEADER_LENGTH, Header, Incoming, Op, Outgoing, Progress, STATUS_LENGTH,
    Status, Version,
};

/// The server's side of one connection.
///
/// Read what [`incoming`](Self::incoming) says and send what [`outgoing`](Self::outgoing) says, and
/// between them look for [`request`](Self::request), [`written`](Self::written) and
/// [`closing`](Self::closing), which wait for the host.
///
/// Calls that do not fit the state change nothing.
#[derive(Debug)]
pub struct Server {
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header(Collected<HEADER_LENGTH>),
    Asked(Header),
    Receiving(Header, Progress),
    Applying(Header),
    /// A status, and what comes after it.
    Answering(Departing<STATUS_LENGTH>, After),
    Sending(Header, Progress),
    Closing(Closing),
}

#[derive(Clone, Copy, Debug)]
enum After {
    NextHeader,
    Payload(Header),
    Close(Closing),
}

/// Why a server closes a connection. Count it; nobody else is disturbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closing {
    /// The client closed it between two operations.
    #[error("the client closed it")]
    Ended,
    /// The client closed it within an operation.
    #[error("the client closed it within an operation")]
    Truncated,
    /// No Mooncake client sends this.
    #[error("opcode {opcode:#04x} is neither READ nor WRITE")]
    UnknownOpcode {
        /// The opcode.
        opcode: u8,
    },
    /// The bytes are not there for the client.
    #[error("{length} bytes at {addr:#x} were rejected")]
    Rejected {
        /// First byte.
        addr: u64,
        /// Bytes.
        length: u64,
        /// How it was asked for: only in version 2 is the client told.
        version: Version,
    },
    /// The bytes of a WRITE could not be applied, or those of a READ not be fetched.
    #[error("{length} bytes at {addr:#x} could not be copied")]
    Failed {
        /// First byte.
        addr: u64,
        /// Bytes.
        length: u64,
    },
}

impl Server {
    /// Of a new connection.
    pub fn new() -> Self {
        Self { state: State::Header(Collected::EMPTY) }
    }

    /// What the next received bytes are.
    pub fn incoming(&self) -> Incoming {
        match &self.state {
            State::Header(header) => Incoming::Framing(header.missing()),
            State::Receiving(_, progress) => Incoming::Payload(progress.payload()),
            _ => Incoming::Nothing,
        }
    }

    /// Takes bytes of the framing and says how many it took; the rest is payload, or belongs to
    /// the next operation.
    pub fn received(&mut self, bytes: &[u8]) -> usize {
        let State::Header(header) = &mut self.state else { return 0 };
        let taken = header.take(bytes);
        if header.missing() == 0 {
            self.state = match Header::decode(&header.bytes) {
                Err(opcode) => State::Closing(Closing::UnknownOpcode { opcode }),
                Ok(header) if header.is_possible() => State::Asked(header),
                Ok(header) => rejection(header),
            };
        }
        taken
    }

    /// Says that so many bytes of the payload were read.
    pub fn received_payload(&mut self, count: u64) {
        if let State::Receiving(header, progress) = &mut self.state
            && progress.moved(count)
        {
            self.state = State::Applying(*header);
        }
    }

    /// Says that the client will send no more.
    pub fn received_end(&mut self) {
        match &self.state {
            State::Header(header) if header.count == 0 => {
                self.state = State::Closing(Closing::Ended);
            }
            // It may close its sending half and still wait for its answer.
            State::Asked(Header { op: Op::Read, .. })
            | State::Applying(_)
            | State::Answering(..)
            | State::Sending(..)
            | State::Closing(_) => {}
            State::Header(_) | State::Asked(_) | State::Receiving(..) => {
                self.state = State::Closing(Closing::Truncated);
            }
        }
    }

    /// What the client asks for, until [`allow`](Self::allow) or [`reject`](Self::reject). The
    /// bytes are some, and inside the address space; whether they lie in one registered region that
    /// peers may use is the host's to say.
    pub fn request(&self) -> Option<Header> {
        match self.state {
            State::Asked(header) => Some(header),
            _ => None,
        }
    }

    /// Lets the request happen.
    pub fn allow(&mut self) {
        let State::Asked(header) = self.state else { return };
        self.state = match (header.op, header.version) {
            (Op::Write, _) => State::Receiving(header, Progress::new(header.length)),
            (Op::Read, Version::V1) => State::Sending(header, Progress::new(header.length)),
            (Op::Read, Version::V2) => answer(Status::Done, After::Payload(header)),
        };
    }

    /// Refuses the request. The connection closes, in version 2 after a status that says why.
    pub fn reject(&mut self) {
        if let State::Asked(header) = self.state {
            self.state = rejection(header);
        }
    }

    /// A WRITE whose payload was received, until [`applied`](Self::applied) or
    /// [`fail`](Self::fail).
    pub fn written(&self) -> Option<Header> {
        match self.state {
            State::Applying(header) => Some(header),
            _ => None,
        }
    }

    /// Says that every byte of the WRITE is where it belongs.
    pub fn applied(&mut self) {
        let State::Applying(header) = self.state else { return };
        self.state = match header.version {
            Version::V1 => State::Header(Collected::EMPTY),
            Version::V2 => answer(Status::Done, After::NextHeader),
        };
    }

    /// Says that the current operation cannot be finished: a copy failed, or the bytes are not there
    /// any more. The connection closes, which is all that Mooncake has to say so.
    pub fn fail(&mut self) {
        if let State::Asked(header)
        | State::Receiving(header, _)
        | State::Applying(header)
        | State::Sending(header, _)
        | State::Answering(_, After::Payload(header)) = self.state
        {
            let Header { addr, length, .. } = header;
            self.state = State::Closing(Closing::Failed { addr, length });
        }
    }

    /// What is sent next.
    pub fn outgoing(&self) -> Outgoing<'_> {
        match &self.state {
            State::Answering(status, _) => Outgoing::Framing(status.rest()),
            State::Sending(_, progress) => Outgoing::Payload(progress.payload()),
            _ => Outgoing::Nothing,
        }
    }

    /// Says that so many bytes of what [`outgoing`](Self::outgoing) says were sent.
    pub fn sent(&mut self, count: u64) {
        let next = match &mut self.state {
            State::Answering(status, after) => {
                let whole = status.sent(usize::try_from(count).unwrap_or(usize::MAX));
                whole.then_some(match *after {
                    After::NextHeader => State::Header(Collected::EMPTY),
                    After::Payload(header) => State::Sending(header, Progress::new(header.length)),
                    After::Close(closing) => State::Closing(closing),
                })
            }
            State::Sending(_, progress) => {
                progress.moved(count).then_some(State::Header(Collected::EMPTY))
            }
            _ => None,
        };
        if let Some(next) = next {
            self.state = next;
        }
    }

    /// Why to close the connection, once all is sent.
    ///
    /// After a rejection a client may still be sending its payload. Close the sending half, and read
    /// and drop what arrives, for a bounded time: closing with unread bytes resets the connection,
    /// and the status could be lost.
    pub fn closing(&self) -> Option<Closing> {
        match self.state {
            State::Closing(closing) => Some(closing),
            _ => None,
        }
    }

    /// Whether the last request was rejected, also while the status that says so is still to be sent.
    pub fn is_rejected(&self) -> bool {
        matches!(
            self.state,
            State::Answering(_, After::Close(_)) | State::Closing(Closing::Rejected { .. })
        )
    }

    /// Whether no operation has begun: such a connection may be retired at any time.
    pub fn is_idle(&self) -> bool {
        matches!(&self.state, State::Header(header) if header.count == 0)
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::new()
    }
}

fn answer(status: Status, after: After) -> State {
    State::Answering(Departing::new(status.encode()), after)
}

fn rejection(Header { version, addr, length, .. }: Header) -> State {
    let closing = Closing::Rejected { addr, length, version };
    match version {
        Version::V1 => State::Closing(closing),
        Version::V2 => answer(Status::AddressRejected, After::Close(closing)),
    }
}
