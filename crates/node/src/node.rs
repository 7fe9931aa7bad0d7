use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_engine::{Config, Engine, Identity, Listener, Served, endpoint};
use kvferry_wire::segment::{Descriptor, Extension};

use crate::address::Address;
use crate::batch_port;
use crate::describe::{self, Local};
use crate::error::NodeError;
use crate::exports::{self, Connection};
use crate::handshake;
use crate::monitor::Monitor;
use crate::mooncake::{Mooncake, MooncakeLimits, MooncakePeer};
use crate::peer::Peer;
use crate::service::{Service, ServiceOptions, WhenFull};
use crate::socket;

/// How a node starts.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Where the handshake listens; port 0 takes any free one. Loopback by default.
    pub listen: SocketAddr,
    /// The `host:port` that peers open, if it is not the address listened on. Port 0 stands for
    /// the port listened on.
    pub name: Option<String>,
    /// Where peers that map no memory of this node reach it, by the batch protocol; port 0 takes any
    /// free one. Loopback by default; `None` serves no such peer.
    pub batch_listen: Option<SocketAddr>,
    /// The port that peers are told for the batch protocol, if something else than the address
    /// listened on forwards to it.
    pub batch_port: Option<u16>,
    /// Bounds of Mooncake's TCP transport, which listens on another port of the same address.
    pub mooncake: MooncakeLimits,
}

impl Default for NodeOptions {
    fn default() -> Self {
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let mooncake = MooncakeLimits::default();
        Self { listen: any, name: None, batch_listen: Some(any), batch_port: None, mooncake }
    }
}

/// An engine under a name. Dropping it ends what it serves: nobody opens it any more, and the peers
/// that opened it see it as lost.
///
/// The peers that it opened are not its own. A [`Peer`] works as long as it is kept, with or without
/// the node; of a [`MooncakePeer`] the transfers run on the node's threads, and end with them as
/// [`TransferError::Closed`](crate::TransferError::Closed).
#[derive(Debug)]
pub struct Node {
    local: Arc<Local>,
    monitor: Arc<Monitor>,
    _handshake: Service,
    _exports: Service,
    mooncake: Option<Mooncake>,
}

impl Node {
    /// Starts to serve `engine`'s registered memory.
    ///
    /// # Errors
    /// [`NodeError::Listen`] if the port is taken; the engine's for that of the batch protocol; [`NodeError::NameMissing`] if it listens on all
    /// addresses and no name is given; [`NodeError::BadAddress`] for the name.
    pub fn start(engine: Arc<Engine>, options: &NodeOptions) -> Result<Arc<Self>, NodeError> {
        let listen = options.listen;
        let refused =
            |error: std::io::Error| NodeError::Listen { listen, reason: error.to_string() };
        let given = options.name.as_deref().map(Address::parse).transpose()?;
        if given.is_none() && listen.ip().is_unspecified() {
            return Err(NodeError::NameMissing { listen });
        }
        let listener = endpoint::listen(listen).map_err(refused)?;
        let bound = listener.local_addr().map_err(refused)?;
        let data = match serves_mooncake(engine.config()) {
            true => Some(listen_beside(bound).map_err(refused)?),
            false => None,
        };

        let socket = format!("kvferry-{}", Identity::random());
        let exports = socket::listen_unix(&socket)
            .map_err(|error| NodeError::system("listening on a Unix socket", error))?;
        let batch = options.batch_listen.map(|address| engine.listen(address)).transpose()?;
        let local = Arc::new(Local {
            engine,
            name: name(given, bound),
            host: describe::boot_id()?,
            socket,
            data_port: data.as_ref().map(|(_, port)| *port),
            rejected: AtomicU64::new(0),
            served: Served::new("mooncake"),
            batch,
            batch_port: options.batch_port,
        });
        let node = Self {
            monitor: Monitor::start()?,
            _handshake: Service::start(listener.into(), HANDSHAKE, {
                let local = Arc::clone(&local);
                Arc::new(move |socket| handshake::serve(&local, socket))
            })?,
            _exports: Service::start(exports, EXPORTS, {
                let local = Arc::clone(&local);
                Arc::new(move |socket| exports::serve(&local, socket))
            })?,
            mooncake: data
                .map(|(data, _)| Mooncake::start(&local, data, options.mooncake))
                .transpose()?,
            local,
        };
        let Local { name, host, socket, .. } = &*node.local;
        tracing::debug!(node = name, %bound, %host, socket, incarnation = %node.local.engine.incarnation(), "node started");
        Ok(Arc::new(node))
    }

    /// The `host:port` that peers open.
    pub fn name(&self) -> &str {
        &self.local.name
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.local.engine
    }

    /// Where Mooncake's TCP transport listens, on the host of the name; none if the engine's
    /// configuration [refuses](kvferry_engine::Config::serves_mooncake) it.
    pub fn data_port(&self) -> Option<u16> {
        self.local.data_port
    }

    /// Where it listens for the batch protocol, if it does.
    pub fn batch_address(&self) -> Option<SocketAddr> {
        self.local.batch.as_ref().map(Listener::address)
    }

    /// How many connections, to any of its ports, ended because of what they said, or did not say
    /// in time.
    pub fn rejected(&self) -> u64 {
        let lanes = self.local.batch.as_ref().map_or(0, Listener::rejected);
        self.local.rejected.load(Ordering::Relaxed) + lanes
    }

    /// Opens a peer, which may be another engine of this process or this node itself. Takes 10
    /// seconds at most, plus what the resolver takes.
    ///
    /// # Errors
    /// [`NodeError::BadAddress`], [`NodeError::Handshake`], [`NodeError::Descriptor`],
    /// [`NodeError::Unreachable`] for a peer on another host without the batch protocol, and for stock
    /// Mooncake, which [`Node::open_mooncake`] opens; [`NodeError::Exports`] and
    /// [`NodeError::OtherUser`] under `MC_KVFERRY_STRICT` or without its batch port (else it is reached
    /// over TCP, and said so), [`NodeError::Engine`].
    pub fn open(&self, name: &str) -> Result<Peer, NodeError> {
        self.local.engine.check_process()?;
        let address = Address::of_peer(name)?;
        let descriptor = handshake::fetch(&address)?;
        self.open_descriptor(name, address, descriptor)
    }

    /// The descriptor of the memory that is registered now, as JSON, for [`Node::open_segment`] of
    /// a peer that gets it by other ways than this node's port.
    ///
    /// # Errors
    /// [`NodeError::Descriptor`] for more memory than a descriptor may hold.
    pub fn segment(&self) -> Result<Vec<u8>, NodeError> {
        self.local.engine.check_process()?;
        let failed = |error| NodeError::Descriptor { peer: self.name().to_owned(), error };
        self.local.descriptor().map_err(failed)
    }

    /// As [`Node::open`], from the peer's [`Node::segment`].
    ///
    /// # Errors
    /// As [`Node::open`].
    pub fn open_segment(&self, segment: &[u8]) -> Result<Peer, NodeError> {
        self.local.engine.check_process()?;
        let refused = |error| NodeError::Descriptor { peer: "a segment".into(), error };
        let descriptor = kvferry_wire::segment::parse(segment).map_err(refused)?;
        let name = descriptor.name.clone();
        self.open_descriptor(&name, Address::of_peer(&name)?, descriptor)
    }

    fn open_descriptor(
        &self,
        name: &str,
        address: Address,
        descriptor: Descriptor,
    ) -> Result<Peer, NodeError> {
        let ours = self.local.host;
        let unreachable = |theirs: String, remedy| NodeError::Unreachable {
            peer: name.to_owned(),
            ours: ours.to_string(),
            theirs,
            remedy,
        };
        let extension = descriptor.kvferry.ok_or_else(|| {
            unreachable("unknown, as it is no kvferry node".into(), BY_MOONCAKES_TRANSPORT)
        })?;
        let is_here = extension.host == ours;
        if !is_here || self.local.engine.config().force_tcp {
            let target = batch_port::open(&self.local, name, &address, &extension, false)?;
            let theirs = extension.host;
            let target =
                target.ok_or_else(|| unreachable(theirs.to_string(), BY_THE_BATCH_PROTOCOL))?;
            let why_far = match is_here {
                true => "MC_FORCE_TCP is set".to_owned(),
                false => format!("its host is {theirs}, this one is {ours}"),
            };
            return Ok(Peer::over_tcp(address, target, why_far));
        }
        let socket = match exports::connect(name, &extension) {
            Ok(socket) => socket,
            Err(cause) => return self.open_instead(name, address, &extension, cause),
        };
        let connection = Arc::new(Connection::open(name, &extension, socket)?);
        let segment = describe::segment(name, &extension);
        let (engine, exports) = (&self.local.engine, Arc::clone(&connection) as _);
        let target = match batch_port::address(&address, &extension) {
            Some(batch) => engine.open_beside_tcp(name, segment, exports, &batch)?,
            None => engine.open(name, segment, exports)?,
        };
        let watch = self.monitor.watch(Arc::clone(connection.socket()), target.clone());
        let incarnation = extension.incarnation;
        tracing::debug!(node = self.name(), peer = name, %incarnation, regions = extension.regions.len(), "opened a peer on this host");
        Ok(Peer::mapped(address, target, watch))
    }

    /// Opens a peer on this host that hands out no exports to this process, by TCP if it serves that.
    ///
    /// # Errors
    /// `cause`, if it does not, or under `MC_KVFERRY_STRICT`.
    fn open_instead(
        &self,
        name: &str,
        address: Address,
        extension: &Extension,
        cause: NodeError,
    ) -> Result<Peer, NodeError> {
        if self.local.engine.config().strict {
            return Err(cause);
        }
        let target = batch_port::open(&self.local, name, &address, extension, true)?;
        let Some(target) = target else { return Err(cause) };
        tracing::warn!(peer = name, %cause, "a peer on this host is reached over TCP, which is slower: its memory cannot be mapped");
        Ok(Peer::over_tcp(address, target, cause.to_string()))
    }

    /// Opens a peer for transfers by Mooncake's TCP transport, which is any that serves it: stock
    /// Mooncake, on whichever host. Takes 10 seconds at most, plus what the resolver takes.
    ///
    /// # Errors
    /// [`NodeError::BadAddress`], [`NodeError::Handshake`], [`NodeError::Descriptor`],
    /// [`NodeError::NoDataPort`], [`NodeError::MooncakeRefused`].
    pub fn open_mooncake(&self, name: &str) -> Result<MooncakePeer, NodeError> {
        self.local.engine.check_process()?;
        let mooncake = self.mooncake.as_ref().ok_or(NodeError::MooncakeRefused)?;
        mooncake.open(name, &self.local.engine)
    }
}

/// What reaches peers that [`Node::open`] does not.
const BY_MOONCAKES_TRANSPORT: &str =
    "open it with Node::open_mooncake, which moves bytes by Mooncake's own TCP transport";
const BY_THE_BATCH_PROTOCOL: &str = "have it serve the batch protocol, by which another host could be reached (NodeOptions::batch_listen)";

/// Whether Mooncake's transport is served. What it does to a key is said, since nobody asks for it.
fn serves_mooncake(config: &Config) -> bool {
    let serves = config.serves_mooncake();
    if config.auth_key_file.is_some() && serves {
        tracing::warn!(
            "MC_KVFERRY_AUTH_KEY_FILE is set, but MC_KVFERRY_MOONCAKE=on lets whoever reaches the data \
             port read and write registered memory without the key"
        );
    } else if config.auth_key_file.is_some() && config.mooncake.is_none() {
        tracing::warn!(
            "Mooncake's TCP transport is off, because MC_KVFERRY_AUTH_KEY_FILE is set and it knows no \
             keys; MC_KVFERRY_MOONCAKE=on opens it all the same, MC_KVFERRY_MOONCAKE=off silences this"
        );
    }
    serves
}

/// Requests are short, so one that keeps its connection while all are taken is stuck.
const HANDSHAKE: ServiceOptions =
    ServiceOptions { name: "kvferry-meta", limit: 64, when_full: WhenFull::EndOldest };

/// A connection lasts as long as the peer; all are of this user.
const EXPORTS: ServiceOptions =
    ServiceOptions { name: "kvferry-exports", limit: 1024, when_full: WhenFull::Refuse };

/// Listens on another port of the same address, and says which.
fn listen_beside(mut address: SocketAddr) -> std::io::Result<(TcpListener, u16)> {
    address.set_port(0);
    let listener = endpoint::listen(address)?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

fn name(given: Option<Address>, bound: SocketAddr) -> String {
    match given {
        Some(Address { host, port: 0 }) => Address { host, port: bound.port() }.to_string(),
        Some(address) => address.to_string(),
        None => bound.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_the_bound_port_unless_it_says_another() {
        let name = |given: &str, bound: &str| {
            name(Some(Address::parse(given).unwrap()), bound.parse().unwrap())
        };
        assert_eq!(name("host-a:0", "0.0.0.0:1234"), "host-a:1234");
        assert_eq!(name("[::1]:0", "[::]:1234"), "[::1]:1234");
        assert_eq!(name("host-a:80", "0.0.0.0:1234"), "host-a:80");
        assert_eq!(super::name(None, "[::1]:1234".parse().unwrap()), "[::1]:1234");
    }
}
