//! The soak of a page store, short. `kvferry soak --store --minutes 10 --device cuda:0` is the long one.

use std::process::{Command, Output};

fn soak(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(["soak", "--store"]).args(arguments).output().expect("the command starts")
}

#[test]
fn random_pages_of_several_threads_go_out_and_come_back_whole() {
    for seed in ["1", "2"] {
        let output = soak(&["--minutes", "0.05", "--most-mib", "4", "--seed", seed]);
        let said = String::from_utf8_lossy(&output.stdout);
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "seed {seed}: {said}{complained}");
        assert!(said.contains("rounds verified") && said.contains("0 mismatches"), "{said}");
        let rounds = said.split(' ').next().and_then(|count| count.parse::<u64>().ok());
        assert!(rounds.is_some_and(|rounds| rounds > 20), "{said}");
    }
}

#[test]
fn a_store_has_no_peer_and_no_sockets() {
    let output = soak(&["--transport", "tcp"]);
    assert!(!output.status.success());
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(complained.contains("--store"), "{complained}");
}
