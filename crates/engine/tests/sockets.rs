//! FAILURES.md B39: how many sockets transfers take. Alone in its process, since it counts what the
//! whole process holds, and takes all of its descriptors.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_engine::{BatchId, Buffer, Config, Engine, Error, Listener, Op, Range, State, Target};
use rustix::process::{Resource, getrlimit, setrlimit};

const PATIENCE: Duration = Duration::from_secs(60);
const LANES: usize = 3;
/// Transfers, and how many of them at once.
const TRANSFERS: u64 = 10_000;
const AT_ONCE: u64 = 10;

fn engine() -> Arc<Engine> {
    let lookup = |name: &str| match name {
        "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
        "MC_TCP_LANES_PER_PEER" => Some(LANES.to_string().into()),
        "MC_KVFERRY_TCP_THREADS" => Some("2".into()),
        _ => None,
    };
    let config = Config::from_lookup(lookup).expect("good knobs");
    Engine::new(config, vec![kvferry_device::host().expect("always there")]).expect("an engine")
}

struct Pair {
    target: Target,
    local: Buffer,
    remote: Buffer,
    here: Arc<Engine>,
    there: Arc<Engine>,
    listener: Listener,
}

impl Pair {
    fn new() -> Self {
        let (here, there) = (engine(), engine());
        let buffer = |engine: &Arc<Engine>| engine.allocate(&engine.devices()[0], 1 << 16);
        let (local, remote) = (buffer(&here).expect("memory"), buffer(&there).expect("memory"));
        let listener = there.listen("127.0.0.1:0".parse().expect("an address")).expect("listens");
        let address = listener.address().to_string();
        let target = here.open_tcp("peer", there.segment(), &address).expect("opens");
        Self { target, local, remote, here, there, listener }
    }

    fn submit(&self, at: u64) -> BatchId {
        let offset = at % AT_ONCE * 4096;
        let (local, remote) = (self.local.addr() + offset, self.remote.addr() + offset);
        let op = if at.is_multiple_of(2) { Op::Write } else { Op::Read };
        self.here.submit(&self.target, op, &[Range { local, remote, len: 4096 }]).expect("submits")
    }

    fn end(&self, id: BatchId) -> State {
        let state = self.here.wait(id, PATIENCE).expect("known").state;
        self.here.release(id).expect("it ended");
        state
    }

    /// Connections to the listener's port that the system knows, in whatever state: both ends'
    /// addresses, each once.
    fn connections(&self) -> HashSet<[String; 2]> {
        let port = format!(":{:04X}", self.listener.address().port());
        let table = std::fs::read_to_string("/proc/self/net/tcp").expect("linux");
        let ends = |line: &str| {
            let mut fields = line.split_whitespace().skip(1);
            Some([fields.next()?, fields.next()?].map(str::to_owned))
        };
        // Remote ends alone: the listener itself has none, and what waits after its end is there.
        table.lines().filter_map(ends).filter(|[_, remote]| remote.ends_with(&port)).collect()
    }
}

fn sockets() -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").expect("linux");
    let links = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn ten_thousand_transfers_take_a_socket_a_lane_and_running_out_of_descriptors_heals() {
    let before = sockets();
    let pair = Pair::new();
    // Whoever had the port before may have left some that wait after their end.
    let others = pair.connections();
    let mut open = std::collections::VecDeque::new();
    let mut most = (0, 0);
    for at in 0..TRANSFERS {
        open.push_back(pair.submit(at));
        if open.len() as u64 == AT_ONCE {
            assert_eq!(pair.end(open.pop_front().expect("ten")), State::Completed);
        }
        if at % 100 == 0 {
            let ours = pair.connections().difference(&others).count();
            most = (most.0.max(sockets() - before), most.1.max(ours));
        }
    }
    open.into_iter().for_each(|id| assert_eq!(pair.end(id), State::Completed));
    // Both ends are this process's, and the listener.
    assert!(most.0 <= 2 * LANES + 1, "{} sockets", most.0);
    assert!(most.1 <= LANES, "{} connections in all states", most.1);
    assert!(most.1 > 0, "none was seen: the test shows nothing");
    no_descriptors_is_a_named_error_and_heals();
}

fn no_descriptors_is_a_named_error_and_heals() {
    let pair = Pair::new();
    let stat = File::open("/proc/self/stat").expect("linux");
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(256);
    setrlimit(Resource::Nofile, limit).expect("a lower limit");
    let taken: Vec<File> = std::iter::from_fn(|| stat.try_clone().ok()).collect();
    let start = Instant::now();
    let state = pair.end(pair.submit(0));
    let State::Failed(Error::Tcp { reason, .. }) = state else { panic!("{state:?}") };
    assert!(reason.contains("Too many open files"), "{reason}");
    assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
    drop(taken);
    // The same target, without a restart of anything.
    for at in 0..2 * AT_ONCE {
        assert_eq!(pair.end(pair.submit(at)), State::Completed, "transfer {at}");
    }
    assert_eq!(pair.there.unregister(pair.remote.addr()), Ok(()));
    // SAFETY: the buffer's own memory, which it unregisters when it is dropped.
    unsafe { pair.there.register(pair.remote.addr(), 1 << 16) }.expect("as before");
}
