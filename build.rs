//! Names the shared library, and keeps it in a process that closes it: its threads run on.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvferry.so.0");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
