//! docs/knobs.md is the code's own table. `KVFERRY_UPDATE=1 cargo test --test knobs` writes it.

use std::fmt::Write;

use kvferry::KNOBS;

const INTRODUCTION: &str = "\
# Knobs

Environment variables, read when an engine is made. A value that is not accepted is an error that names
it; an unknown `MC_KVFERRY_*` name is warned about. `kvferry doctor` shows the values in force, and which
of environment, profile and default each comes from. This page is generated from the code
(`KVFERRY_UPDATE=1 cargo test --test knobs`).

| knob | default | accepts | what it changes |
|---|---|---|---|
";

#[test]
fn the_page_of_knobs_is_what_the_code_says() {
    let mut page = String::from(INTRODUCTION);
    for knob in KNOBS {
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} |",
            knob.name, knob.default, knob.accepts, knob.about
        );
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/knobs.md");
    if std::env::var_os("KVFERRY_UPDATE").is_some() {
        std::fs::write(file, &page).expect("docs/knobs.md is written");
    }
    let written = std::fs::read_to_string(file).unwrap_or_default();
    assert!(written == page, "docs/knobs.md is old: KVFERRY_UPDATE=1 cargo test --test knobs");
}
