//! A TCP proxy that delays, starves and cuts connections at random, and never alters a byte.
//!
//! Every direction of every connection has its own stream of random numbers, from one seed: after so
//! many bytes something is done to it, again and again until it is cut. Nothing is done while the
//! proxy is calm.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

/// What is done to a connection. The last six end it, or one direction of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// What comes next waits for a moment.
    Delay,
    /// It waits for longer than the sides' patience.
    Stall,
    /// It arrives in a few bytes at a time.
    Trickle,
    /// The receiver hears an end, the sender does not; what it still sends is lost.
    HalfClose,
    /// All that comes next is lost, and both hear an end.
    Truncate,
    /// Both hear a reset.
    Reset,
    /// The sender hears a reset at once. What it has sent arrives later, when it may have sent that
    /// again on another connection; then the receiver hears an end.
    Late,
    /// All that comes next is lost in silence, until the proxy is calm.
    Drop,
    /// Not accepted; of a listener, nor are others for a while.
    Refuse,
}

impl Deed {
    const ALL: [(Self, &str); 9] = [
        (Self::Delay, "delays"),
        (Self::Stall, "stalls"),
        (Self::Trickle, "trickles"),
        (Self::HalfClose, "half-closes"),
        (Self::Truncate, "truncations"),
        (Self::Reset, "resets"),
        (Self::Late, "late arrivals"),
        (Self::Drop, "silent drops"),
        (Self::Refuse, "refusals"),
    ];

    /// What is done to an open connection. Silence costs seconds, so there is little of it.
    fn any(random: &mut SmallRng) -> Self {
        match random.random_range(0..200) {
            0..70 => Self::Delay,
            70..120 => Self::Trickle,
            120..144 => Self::HalfClose,
            144..168 => Self::Truncate,
            168..184 => Self::Reset,
            184..196 => Self::Late,
            196..198 => Self::Stall,
            _ => Self::Drop,
        }
    }
}

/// How often each thing was done.
#[derive(Debug, Default)]
pub(crate) struct Counts([AtomicU64; Deed::ALL.len()]);

impl Counts {
    fn add(&self, deed: Deed) {
        self.0[deed as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn of(&self, deed: Deed) -> u64 {
        self.0[deed as usize].load(Ordering::Relaxed)
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (deed, name)) in Deed::ALL.into_iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{} {name}", self.of(deed))?;
        }
        Ok(())
    }
}

/// The proxy; dropping it ends it and all its connections.
#[derive(Debug)]
pub(crate) struct Chaos {
    runtime: Runtime,
    shared: Arc<Shared>,
    rages: watch::Sender<bool>,
}

#[derive(Debug)]
struct Shared {
    rages: watch::Receiver<bool>,
    counts: Counts,
    /// How long both sides wait for each other at most.
    patience: Duration,
}

/// A port of the proxy. Connections are refused until it has something to forward to.
#[derive(Debug)]
pub(crate) struct Door {
    /// Keeps the port while nobody listens.
    keeper: TcpSocket,
    address: SocketAddr,
}

impl Chaos {
    /// A calm proxy between sides that wait for each other for so long.
    pub(crate) fn start(patience: Duration) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("chaos")
            .enable_io()
            .enable_time()
            .build()?;
        let (rages, seen) = watch::channel(false);
        let shared = Shared { rages: seen, counts: Counts::default(), patience };
        Ok(Self { runtime, shared: Arc::new(shared), rages })
    }

    /// Takes a free port of loopback.
    pub(crate) fn door(&self) -> io::Result<Door> {
        let keeper = bind((Ipv4Addr::LOCALHOST, 0).into())?;
        Ok(Door { address: keeper.local_addr()?, keeper })
    }

    /// Forwards connections from the door to `upstream`.
    pub(crate) fn forward(&self, door: Door, upstream: SocketAddr, seed: u64) {
        let shared = Arc::clone(&self.shared);
        self.runtime.spawn(async move {
            if let Err(error) = listen(&door, upstream, seed, &shared).await {
                tracing::error!(%error, "the chaos proxy cannot listen any more");
            }
        });
    }

    pub(crate) fn rage(&self) {
        self.rages.send_replace(true);
    }

    /// From now on all bytes pass. Connections that lost some are cut.
    pub(crate) fn calm(&self) {
        self.rages.send_replace(false);
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.shared.counts
    }
}

impl Door {
    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }
}

impl Shared {
    fn rages(&self) -> bool {
        *self.rages.borrow()
    }

    /// Returns when the proxy is calm.
    async fn calm(&self) {
        // An error is the end of the proxy.
        let _ = self.rages.clone().wait_for(|rages| !rages).await;
    }

    /// Waits, at most until the proxy is calm.
    async fn pause(&self, time: Duration) {
        let _ = tokio::time::timeout(time, self.calm()).await;
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // Several sockets may have the port as long as one at most listens.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

async fn listen(
    door: &Door,
    upstream: SocketAddr,
    seed: u64,
    shared: &Arc<Shared>,
) -> io::Result<()> {
    let mut random = SmallRng::seed_from_u64(seed);
    loop {
        let listener = bind(door.keeper.local_addr()?)?.listen(1024)?;
        let refused = accept(&listener, upstream, &mut random, shared).await?;
        drop(listener);
        refused.set_zero_linger()?;
        drop(refused);
        let time = Duration::from_millis(random.random_range(20..1500));
        shared.pause(time).await;
    }
}

/// Forwards connections until one is refused, and others for a while.
async fn accept(
    listener: &TcpListener,
    upstream: SocketAddr,
    random: &mut SmallRng,
    shared: &Arc<Shared>,
) -> io::Result<TcpStream> {
    loop {
        let (client, _) = listener.accept().await?;
        let randoms = [0; 2].map(|_| SmallRng::seed_from_u64(random.random()));
        let (refused, shuts) = (random.random_ratio(1, 12), random.random_ratio(1, 4));
        if refused && shared.rages() {
            shared.counts.add(Deed::Refuse);
            if shuts {
                return Ok(client);
            }
            client.set_zero_linger()?;
            continue;
        }
        let shared = Arc::clone(shared);
        tokio::spawn(async move {
            if let Err(error) = forward(client, upstream, randoms, &shared).await {
                tracing::debug!(%error, "a connection through the chaos proxy ended");
            }
        });
    }
}

/// How a connection is cut.
enum Cut {
    Truncated,
    Reset,
    /// On the way are these bytes.
    Late {
        bytes: Vec<u8>,
        from_client: bool,
        after: Duration,
    },
}

impl From<io::Error> for Cut {
    /// What one side did to its connection happens to the other's.
    fn from(_: io::Error) -> Self {
        Self::Reset
    }
}

async fn forward(
    mut client: TcpStream,
    upstream: SocketAddr,
    randoms: [SmallRng; 2],
    shared: &Shared,
) -> io::Result<()> {
    let mut server = match TcpStream::connect(upstream).await {
        Ok(server) => server,
        Err(error) => {
            client.set_zero_linger()?;
            return Err(error);
        }
    };
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let cut = {
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let [there, back] = randoms;
        tokio::try_join!(
            pump(&mut from_client, &mut to_server, true, there, shared),
            pump(&mut from_server, &mut to_client, false, back, shared),
        )
    };
    match cut {
        Ok(_) => Ok(()),
        Err(Cut::Truncated) => {
            client.shutdown().await?;
            server.shutdown().await?;
            // Closing with bytes unread would be a reset, which takes back what was sent.
            let (mut from_client, _) = client.split();
            let (mut from_server, _) = server.split();
            let rest = async {
                tokio::join!(discard(&mut from_client), discard(&mut from_server));
            };
            let _ = tokio::time::timeout(shared.patience, rest).await;
            Ok(())
        }
        Err(Cut::Reset) => {
            client.set_zero_linger()?;
            server.set_zero_linger()
        }
        Err(Cut::Late { bytes, from_client, after }) => {
            let (sender, mut receiver) =
                if from_client { (client, server) } else { (server, client) };
            sender.set_zero_linger()?;
            drop(sender);
            // Calm does not hurry what is on its way.
            tokio::time::sleep(after).await;
            let rest = async {
                receiver.write_all(&bytes).await?;
                receiver.shutdown().await?;
                discard(&mut receiver.split().0).await;
                io::Result::Ok(())
            };
            tokio::time::timeout(shared.patience, rest).await.unwrap_or(Ok(()))
        }
    }
}

const BUFFER: usize = 64 << 10;

/// Bytes that arrive late, about.
const LATE: usize = 1 << 20;

/// Forwards one direction until its end, and does to it what its random numbers say.
async fn pump(
    from: &mut ReadHalf<'_>,
    to: &mut WriteHalf<'_>,
    from_client: bool,
    mut random: SmallRng,
    shared: &Shared,
) -> Result<(), Cut> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let mut left = distance(&mut random);
        while left > 0 {
            let most = buffer.len().min(left);
            match from.read(&mut buffer[..most]).await? {
                0 => return Ok(to.shutdown().await?),
                count => {
                    to.write_all(&buffer[..count]).await?;
                    left -= count;
                }
            }
        }
        let deed = Deed::any(&mut random);
        if !shared.rages() {
            continue;
        }
        shared.counts.add(deed);
        match deed {
            Deed::Delay => {
                shared.pause(Duration::from_millis(random.random_range(1..60))).await;
            }
            Deed::Stall => {
                let longer = Duration::from_millis(random.random_range(200..1200));
                shared.pause(shared.patience + longer).await;
            }
            Deed::Trickle => {
                for _ in 0..random.random_range(1..150) {
                    let most = random.random_range(1..=16);
                    match from.read(&mut buffer[..most]).await? {
                        0 => return Ok(to.shutdown().await?),
                        count => to.write_all(&buffer[..count]).await?,
                    }
                    shared.pause(Duration::from_millis(1)).await;
                }
            }
            Deed::HalfClose => {
                to.shutdown().await?;
                discard(from).await;
                return Ok(());
            }
            Deed::Truncate => return Err(Cut::Truncated),
            Deed::Late => {
                let mut bytes = Vec::new();
                let gather = async {
                    while bytes.len() < LATE && from.read_buf(&mut bytes).await? > 0 {}
                    io::Result::Ok(())
                };
                if let Ok(ended) = tokio::time::timeout(Duration::from_millis(5), gather).await {
                    ended?;
                }
                let after = Duration::from_millis(random.random_range(50..1500));
                return Err(Cut::Late { bytes, from_client, after });
            }
            Deed::Drop => {
                // A side that gives up first is heard of by the other.
                tokio::select! {
                    () = discard(from) => {}
                    () = shared.calm() => {}
                }
                return Err(Cut::Reset);
            }
            Deed::Reset | Deed::Refuse => return Err(Cut::Reset),
        }
    }
}

/// Bytes until something happens: from inside the first frame to beyond a large request, every
/// order of magnitude as likely as another.
fn distance(random: &mut SmallRng) -> usize {
    let bits = random.random_range(4..24);
    random.random_range(1..=2 << bits)
}

async fn discard(from: &mut ReadHalf<'_>) {
    let mut buffer = vec![0; BUFFER];
    while from.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_millis(20);
    const BYTES: usize = 1 << 20;

    fn pattern(seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        SmallRng::seed_from_u64(seed).fill(&mut bytes[..]);
        bytes
    }

    /// Sends a pattern each way through a connection of the proxy, and returns what came out.
    fn exchange(address: SocketAddr, listener: &TcpListener) -> io::Result<[Vec<u8>; 2]> {
        let talk = |mut stream: TcpStream, seed| {
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            stream.set_write_timeout(Some(Duration::from_secs(10)))?;
            let mut sender = stream.try_clone()?;
            let sending = std::thread::spawn(move || {
                let _ = sender.write_all(&pattern(seed));
                let _ = sender.shutdown(Shutdown::Write);
            });
            let mut found = Vec::new();
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = stream.read(&mut part) {
                found.extend_from_slice(&part[..count]);
            }
            sending.join().expect("it only sends");
            io::Result::Ok(found)
        };
        let client = TcpStream::connect(address)?;
        let client = std::thread::spawn(move || talk(client, 1));
        // A connection that the proxy refuses never comes.
        let begin = Instant::now();
        let server = loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    break Some(talk(stream, 2)?);
                }
                Err(_) if client.is_finished() || begin.elapsed() > PATIENCE * 100 => break None,
                Err(_) => std::thread::yield_now(),
            }
        };
        let client = client.join().expect("it returns errors")?;
        Ok([server.unwrap_or_default(), client])
    }

    fn start(seed: u64) -> (Chaos, SocketAddr, TcpListener) {
        let chaos = Chaos::start(PATIENCE).expect("threads");
        let door = chaos.door().expect("a port");
        let address = door.address;
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        chaos.forward(door, listener.local_addr().expect("bound"), seed);
        (chaos, address, listener)
    }

    /// It listens as soon as its task runs.
    fn exchange_once_it_listens(address: SocketAddr, listener: &TcpListener) -> [Vec<u8>; 2] {
        let begin = Instant::now();
        loop {
            match exchange(address, listener) {
                Ok(found) => return found,
                Err(error) => assert!(begin.elapsed() < Duration::from_secs(10), "{error}"),
            }
        }
    }

    #[test]
    fn a_calm_proxy_forwards_everything_each_way() {
        let (chaos, address, listener) = start(1);
        let [there, back] = exchange_once_it_listens(address, &listener);
        assert!(there == pattern(1) && back == pattern(2));
        assert!(Deed::ALL.iter().all(|&(deed, _)| chaos.counts().of(deed) == 0));
    }

    #[test]
    fn a_raging_proxy_does_everything_but_alter_bytes() {
        let (chaos, address, listener) = start(2);
        exchange_once_it_listens(address, &listener);
        let [right, left] = [pattern(1), pattern(2)];
        let missing = |chaos: &Chaos| {
            let counts = chaos.counts();
            Deed::ALL.into_iter().find(|&(deed, _)| counts.of(deed) == 0)
        };
        for _ in 0..2000 {
            // Calm ends what drops in silence, which the two sides here would wait for.
            chaos.rage();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::park_timeout(PATIENCE * 3);
                    chaos.calm();
                });
                if let Ok([there, back]) = exchange(address, &listener) {
                    assert!(right.starts_with(&there), "altered at {}", there.len());
                    assert!(left.starts_with(&back), "altered at {}", back.len());
                }
            });
            if missing(&chaos).is_none() {
                // What raged may still hand over a connection that it cut.
                let begin = Instant::now();
                while exchange_once_it_listens(address, &listener) != [right.clone(), left.clone()]
                {
                    assert!(begin.elapsed() < Duration::from_secs(10), "it is not calm");
                }
                return;
            }
        }
        panic!("no {:?} in all that", missing(&chaos));
    }
}
