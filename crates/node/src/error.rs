use std::net::SocketAddr;

use kvferry_wire::segment::SegmentError;

/// What a node can fail with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The text is no address.
    #[error("{input:?} is not an address, {reason}: write host:port or [v6]:port")]
    BadAddress {
        /// The text.
        input: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The address to listen on is taken or not this host's.
    #[error("cannot listen on {listen}: {reason}; choose another port, or port 0 for any")]
    Listen {
        /// The address asked for.
        listen: SocketAddr,
        /// The system's word.
        reason: String,
    },
    /// An unspecified address is nothing that a peer can open.
    #[error("listening on {listen} needs a name: say which host:port peers shall open")]
    NameMissing {
        /// The address asked for.
        listen: SocketAddr,
    },
    /// The system refused something that the node needs.
    #[error("{call} failed: {reason}")]
    System {
        /// What was asked of the system.
        call: &'static str,
        /// Its word.
        reason: String,
    },
    /// The peer's descriptor could not be fetched.
    #[error("peer {peer} gave no descriptor: {reason}")]
    Handshake {
        /// The peer.
        peer: String,
        /// Why.
        reason: String,
    },
    /// The peer's descriptor is wrong.
    #[error("the descriptor of peer {peer} is refused: {error}")]
    Descriptor {
        /// The peer.
        peer: String,
        /// What is wrong with it.
        #[source]
        error: SegmentError,
    },
    /// No transport leads to the peer.
    #[error("peer {peer} cannot be reached: its host is {theirs}, this one is {ours}; {remedy}")]
    Unreachable {
        /// The peer.
        peer: String,
        /// Boot id of this host.
        ours: String,
        /// Boot id of the peer's host.
        theirs: String,
        /// What would reach it.
        remedy: &'static str,
    },
    /// The peer's export socket could not be used.
    #[error("peer {peer} (process {pid}) does not hand out exports: {reason}")]
    Exports {
        /// The peer.
        peer: String,
        /// Its process id, as it counts.
        pid: u32,
        /// Why.
        reason: String,
    },
    /// The other end of a Unix socket is another user's.
    #[error(
        "the other process runs as user {theirs}, this one as user {ours}: run both as the same user"
    )]
    OtherUser {
        /// Our user id.
        ours: u32,
        /// Theirs.
        theirs: u32,
    },
    /// Another engine answers under the peer's name.
    #[error(
        "peer {peer} was restarted: it was engine {expected}, now {found} answers; open it again"
    )]
    PeerRestarted {
        /// The peer.
        peer: String,
        /// The engine that was opened.
        expected: String,
        /// The engine that answers.
        found: String,
    },
    /// The peer serves no memory by Mooncake's TCP transport.
    #[error(
        "peer {peer} offers no TCP transport: it uses another one (run it with MC_FORCE_TCP=1), or is a kvferry node with MC_KVFERRY_MOONCAKE=off, or with a key (MC_KVFERRY_AUTH_KEY_FILE) and without MC_KVFERRY_MOONCAKE=on"
    )]
    NoDataPort {
        /// The peer.
        peer: String,
    },
    /// This node's engine refuses Mooncake's framing.
    #[error(
        "Mooncake's TCP transport is refused here: MC_KVFERRY_MOONCAKE is off, or unset where MC_KVFERRY_AUTH_KEY_FILE is set"
    )]
    MooncakeRefused,
    /// The engine refused the peer's segment.
    #[error(transparent)]
    Engine(#[from] kvferry_engine::Error),
}

impl NodeError {
    pub(crate) fn system(call: &'static str, error: impl std::fmt::Display) -> Self {
        Self::System { call, reason: error.to_string() }
    }
}
