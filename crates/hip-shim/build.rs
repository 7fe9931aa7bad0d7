//! Gives the library a SONAME with room for those that `install` writes over it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,kvferry_hip_shim_without_soname.so");
    // Calls between its own functions stay inside, whatever else the process has loaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Its threads go on when the last handle is closed.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
