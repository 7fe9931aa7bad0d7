//! FAILURES.md B51: nothing of kvferry runs inside a driver's callback, where no driver may be called
//! and whoever waits, for an interpreter's lock or for anything else, holds up all streams.

use std::path::Path;

/// Calls the function with every source file below a folder; says how many there are.
fn each_source_file(folder: &Path, read: &mut dyn FnMut(&Path, &str)) -> usize {
    let mut files = 0;
    for entry in folder.read_dir().expect("a folder of ours") {
        let path = entry.expect("listed").path();
        if path.is_dir() {
            files += each_source_file(&path, read);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            read(&path, &std::fs::read_to_string(&path).expect("a source file"));
            files += 1;
        }
    }
    files
}

#[test]
fn no_source_file_hands_a_callback_to_a_driver() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // Of both vendors, in the spelling of C and in that of bindings.
    let calls = ["launchhostfunc", "launch_host_func", "streamaddcallback", "stream_add_callback"];
    let folders = ["crates/device/src", "crates/engine/src", "crates/node/src", "src"];
    let files: usize = folders
        .iter()
        .map(|folder| {
            each_source_file(&workspace.join(folder), &mut |path, text| {
                let text = text.to_lowercase();
                for call in calls {
                    assert!(!text.contains(call), "{} names {call}", path.display());
                }
            })
        })
        .sum();
    assert!(files > 100, "only {files} files were read");
}
