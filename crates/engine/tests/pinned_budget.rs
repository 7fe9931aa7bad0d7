//! The slots that stage GPU memory for TCP are page-locked within the budget of the engine.

mod common;

use std::sync::Arc;
use std::time::Duration;

use kvferry_device::Device;
use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{BatchId, Buffer, Engine, Error, Listener, Op, Range, State, Target};

use common::config;

const PATIENCE: Duration = Duration::from_secs(60);
const LEN: u64 = 1 << 20;

/// Two MiB of slots.
const SLOTS: &[(&str, &str)] = &[
    ("MC_KVFERRY_TCP_THREADS", "2"),
    ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
    ("MC_TCP_GPU_STAGING_SLOTS", "2"),
];

/// An engine with a GPU that writes to another.
struct Pair {
    target: Target,
    range: [Range; 1],
    _memory: [Buffer; 2],
    _listener: Listener,
    here: Arc<Engine>,
    there: Arc<Engine>,
}

impl Pair {
    /// With budgets of so many MiB.
    fn new([here, there]: [&str; 2]) -> Self {
        let engine = |budget: &str| {
            let gpu: Arc<dyn Device> = sim(&SimOptions::default()).expect("always there").0;
            let knobs = [SLOTS, &[("MC_KVFERRY_PINNED_MB", budget)]].concat();
            let engine = Engine::new(config(&knobs), vec![Arc::clone(&gpu)]).expect("an engine");
            let memory = engine.allocate(&gpu, LEN).expect("memory");
            (engine, memory)
        };
        let ((here, local), (there, remote)) = (engine(here), engine(there));
        let listener = there.listen("127.0.0.1:0".parse().expect("good")).expect("listens");
        let address = listener.address().to_string();
        let target = here.open_tcp("decode", there.segment(), &address).expect("opens");
        let range = [Range { local: local.addr(), remote: remote.addr(), len: LEN }];
        Self { target, range, _memory: [local, remote], _listener: listener, here, there }
    }

    fn submit(&self) -> Result<BatchId, Error> {
        self.here.submit(&self.target, Op::Write, &self.range)
    }

    fn write(&self) -> State {
        let id = self.submit().expect("submits");
        self.here.wait(id, PATIENCE).expect("known").state
    }
}

#[test]
fn staging_slots_are_of_the_budget_and_both_sides_say_so() {
    let pair = Pair::new(["2", "3"]);
    assert_eq!(pair.here.pinned_account().used(), 0, "made at first use");
    assert_eq!(pair.write(), State::Completed);
    for engine in [&pair.here, &pair.there] {
        assert_eq!(engine.pinned_account().used(), 2 << 20);
        let statistics = engine.statistics();
        assert_eq!((statistics.locked_bytes, statistics.staging_bytes), (2 << 20, 2 << 20));
    }
    // Once for all batches.
    assert_eq!(pair.write(), State::Completed);
    assert_eq!(pair.here.pinned_account().used(), 2 << 20);
}

#[test]
fn a_budget_without_room_for_the_slots_refuses_batches_until_there_is_some() {
    let pair = Pair::new(["3", "3"]);
    let account = pair.here.pinned_account();
    let others = account.take((1 << 20) + 1).expect("fits");
    for _ in 0..2 {
        let refused = pair.submit().expect_err("no room");
        let (bytes, used, budget) = (2 << 20, others.bytes(), 3 << 20);
        assert_eq!(refused, Error::PinnedBudget { bytes, used, budget });
        assert!(refused.to_string().contains("MC_KVFERRY_PINNED_MB"), "{refused}");
    }
    assert_eq!(account.used(), others.bytes());
    drop(others);
    assert_eq!(pair.write(), State::Completed);
}

#[test]
fn a_peer_without_room_for_its_slots_says_which_knob_it_is() {
    let pair = Pair::new(["2", "1"]);
    let state = pair.write();
    let State::Failed(Error::Tcp { peer, reason }) = &state else { panic!("{state:?}") };
    assert!(peer == "decode" && reason.contains("MC_KVFERRY_PINNED_MB"), "{peer}: {reason}");
    assert_eq!(pair.there.pinned_account().used(), 0);
}
