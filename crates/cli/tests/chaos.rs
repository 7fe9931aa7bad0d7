//! The soak behind the chaos proxy, short and from fixed seeds. `kvferry soak --transport tcp
//! --chaos SEED --minutes 10` is the long one.

use std::process::Command;

#[test]
fn whatever_happens_to_connections_batches_end_once_and_no_byte_is_wrong() {
    let mut cuts = 0;
    for seed in ["1", "2", "3"] {
        let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(["soak", "--transport", "tcp", "--chaos", seed, "--seed", seed])
            .args(["--lanes", "3", "--threads", "2", "--most-mib", "8", "--minutes", "0.05"])
            .output()
            .expect("the command starts");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "seed {seed}: {said}{complained}");
        let deeds = said.lines().find_map(|line| line.strip_prefix("the proxy's deeds: "));
        let deeds = deeds.unwrap_or_else(|| panic!("{said}"));
        let count = |name| {
            let named = deeds.split(", ").find_map(|deed| deed.strip_suffix(name));
            named.and_then(|count| count.trim().parse::<u64>().ok()).expect(name)
        };
        cuts += count("resets") + count("truncations") + count("half-closes");
        assert!(said.contains("completed, "), "{said}");
    }
    assert!(cuts > 0, "the proxy cut nothing");
}

#[test]
fn a_proxy_needs_sockets_to_be_between() {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["soak", "--chaos", "1", "--minutes", "0.01"])
        .output()
        .expect("the command starts");
    assert!(!output.status.success());
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(complained.contains("--transport tcp"), "{complained}");
}
