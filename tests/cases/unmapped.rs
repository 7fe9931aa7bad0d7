//! Memory of a peer on this host that mappings should reach and do not: it goes over TCP from then on,
//! and every batch, and one warning, say so.

use std::io::Write;
use std::sync::{Arc, Mutex, Once};

use kvferry::{Error, Op, Path, Range, Strided};
use kvferry_device::sim::Fault;
use rand::Rng;
use rand::rngs::SmallRng;
use tracing::subscriber::NoSubscriber;
use tracing_subscriber::filter::LevelFilter;

use super::private::path;
use super::{Pair, control};
use crate::peer_process::{Image, Kind, Obey, Order, PeerProcess};

const LEN: u64 = 100_000;

/// Moves bytes both ways over TCP, several times, and looks at what is said of it.
fn go_over_tcp(pair: &mut Pair, local: u64, remote: u64, cause: &str, random: &mut SmallRng) {
    let peer = pair.there.name.clone();
    let all = [Range { local, remote, len: LEN }];
    let forms =
        [Strided { local, remote, len: 1000, count: 100, local_stride: 1000, remote_stride: 1000 }];
    let before = pair.here.engine.statistics().fallbacks;
    let mut lines = Vec::new();
    for _ in 0..2 {
        let (ours, theirs): (u64, u64) = (random.random(), random.random());
        pair.here.done(Order::Fill { addr: local, seed: ours });
        pair.there.done(Order::Fill { addr: remote, seed: theirs });
        let write = || path(&pair.here, Op::Write, &all);
        let (moved, said) = warnings(write);
        assert!(matches!(moved, Ok(Path::Tcp | Path::TcpStaged)), "{moved:?}");
        lines.extend(said);
        pair.there.verify(remote, Image::untouched(ours));
        pair.there.done(Order::Fill { addr: remote, seed: theirs });
        let (moved, said) = warnings(|| path(&pair.here, Op::Read, &forms));
        assert!(matches!(moved, Ok(Path::Tcp | Path::TcpStaged)), "{moved:?}");
        lines.extend(said);
        pair.here.verify(local, Image::untouched(theirs));
    }
    lines.retain(|line| line.contains("over TCP"));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains(&peer) && lines[0].contains(cause), "{lines:#?}");
    assert_eq!(pair.here.engine.statistics().fallbacks, before + 4);
    let way = pair.target().way();
    assert!(way.tcp && way.reasons.iter().any(|reason| reason.contains(cause)), "{way:?}");
}

pub(crate) fn devices_that_do_not_work_together_go_over_tcp_and_that_is_said_once(
    kind: Kind,
    random: &mut SmallRng,
) {
    for (fault, cause) in [(0, "read from there"), (1, "written there"), (2, "(217)")] {
        let mut pair = Pair::start(kind);
        let (local, remote) = (pair.here.filled(LEN, 0), pair.there.filled(LEN, 0));
        pair.here.peer().refresh().expect("it answers");
        assert_eq!(pair.target().way().to_string(), "mapped");
        match fault {
            0 => control(&pair.here).corrupt_peer_reads(),
            1 => control(&pair.here).corrupt_peer_writes(),
            _ => control(&pair.here).fail("open", 0, Fault::Code(217)),
        }
        go_over_tcp(&mut pair, local, remote, cause, random);
        assert_eq!(control(&pair.here).calls("open"), 1, "tried again");
        // What the pair says of itself is of this process of the peer.
        control(&pair.here).heal_peer_memory();
        let theirs = random.random();
        let mut other = PeerProcess::start(kind);
        let remote = other.filled(LEN, theirs);
        let good = pair.here.node.open(&other.name).expect("opens");
        let all = [Range { local, remote, len: LEN }];
        pair.here.run(good.target(), Op::Read, &all).expect("reads");
        pair.here.verify(local, Image::untouched(theirs));
        assert_eq!((good.target().open_count(), good.target().way().tcp), (1, false));
    }
}

pub(crate) fn host_memory_without_a_gpu_and_a_gpu_there_go_over_tcp_and_that_is_said_once(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::of(Kind::Host, kind, &[]);
    let (local, remote) = (pair.here.filled(LEN, 0), pair.there.filled(LEN, 0));
    pair.here.peer().refresh().expect("it answers");
    go_over_tcp(&mut pair, local, remote, "no peer access", random);
}

pub(crate) fn an_allocation_that_cannot_be_opened_goes_over_tcp_and_the_others_do_not(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::start(kind);
    let (theirs, its): (u64, u64) = (random.random(), random.random());
    let (good, bad) = (pair.there.filled(LEN, theirs), pair.there.filled(LEN, its));
    let locals = [pair.here.filled(LEN, 0), pair.here.filled(LEN, 0)];
    pair.here.peer().refresh().expect("it answers");
    let range = |local, remote| Range { local, remote, len: LEN };
    let moved = path(&pair.here, Op::Read, &[range(locals[0], good)]).expect("reads");
    assert!(!matches!(moved, Path::Tcp | Path::TcpStaged), "{moved}");
    control(&pair.here).fail("open", 0, Fault::Code(999));
    let both = [range(locals[0], good), range(locals[1], bad)];
    assert_eq!(path(&pair.here, Op::Read, &both), Ok(Path::Mixed));
    pair.here.verify(locals[0], Image::untouched(theirs));
    pair.here.verify(locals[1], Image::untouched(its));
    assert_eq!(pair.here.engine.statistics().fallbacks, 1);
    assert_eq!(pair.target().open_count(), 1);
    let way = pair.target().way();
    assert!(way.mapped && way.tcp && way.reasons.len() == 1, "{way:?}");
    assert!(way.reasons[0].contains("(999)"), "{way:?}");

    // The operator wants none of it.
    let mut pair = Pair::start_with(kind, &[("MC_KVFERRY_STRICT", "1")]);
    let (local, remote) = (pair.here.filled(LEN, theirs), pair.there.filled(LEN, its));
    pair.here.peer().refresh().expect("it answers");
    // The first is the proof's.
    control(&pair.here).fail("open", 1, Fault::Code(999));
    let refused = path(&pair.here, Op::Read, &[range(local, remote)]);
    let Err(error @ Error::NotOpened { .. }) = &refused else { panic!("{refused:?}") };
    for word in ["sim:0", pair.target().name(), "(999)", "MC_FORCE_TCP"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    pair.here.verify(local, Image::untouched(theirs));
    assert_eq!(pair.target().way().to_string(), "mapped");
}

/// The warnings that are logged while `what` runs, on this thread.
fn warnings<R>(what: impl FnOnce() -> R) -> (R, Vec<String>) {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic").extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    // Whether a warning is wanted is asked when it is first met, of that thread alone if this thread's
    // subscriber is the only one. With one more it is asked of all.
    static ANOTHER: Once = Once::new();
    ANOTHER.call_once(|| {
        tracing::subscriber::set_global_default(NoSubscriber::new()).expect("the only one");
    });
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let result = tracing::subscriber::with_default(subscriber, what);
    let bytes = lines.0.lock().expect("no panic").clone();
    (result, String::from_utf8(bytes).expect("text").lines().map(String::from).collect())
}
