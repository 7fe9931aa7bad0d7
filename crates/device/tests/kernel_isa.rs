//! The compiled copy kernel, read as instructions. The compilers of both vendors need no GPU, so
//! what makes the kernel fast or slow can be seen without one: whole 16-byte accesses in the
//! address space of global memory, several of them in flight, and registers that leave room for
//! other blocks (kernels/README.md).
//!
//! A test whose compiler or disassembler is missing prints a SKIP line, or fails if
//! `KVFERRY_TEST_REQUIRE` contains its name: `hiprtc`, `clang-19` with `llvm-19`, `nvrtc` with
//! `cuobjdump`. The compiled code stays in `target/tmp/kernel_isa`.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use kvferry_device::conformance::skip;
use libloading::Library;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/copy.cu");

const ENTRIES: [&str; 6] = [
    "kvferry_copy",
    "kvferry_copy_claimed",
    "kvferry_copy_inline",
    "kvferry_copy_inline_few",
    "kvferry_copy_compact",
    "kvferry_copy_compact_few",
];

/// Loads of 16 bytes that a lane has in flight before it waits for the first.
const LOADS_IN_FLIGHT: usize = 8;

#[test]
fn hiprtc_compiles_every_entry_to_wide_global_accesses_without_spills() {
    // Up to ROCm 6 hipRTC ends the process when it does not know an architecture, so each library
    // gets those that its version knows; of libamdhip64.so.5 that is 5.7, not older.
    for (library, architectures) in [
        ("libhiprtc.so.7", &["gfx90a", "gfx942", "gfx950", "gfx1100"][..]),
        ("libhiprtc.so.6", &["gfx90a", "gfx942", "gfx950", "gfx1100"]),
        ("libamdhip64.so.5", &["gfx90a", "gfx942", "gfx1100"]),
    ] {
        let Some(compiler) = RunTimeCompiler::open("hiprtc", "Code", &[library]) else { continue };
        for architecture in architectures {
            let code = compiler.compile(architecture);
            check_amd(architecture, library, &write(library, architecture, &code));
        }
        return;
    }
    skip("hiprtc", &"no hipRTC of ROCm 5, 6 or 7 can be opened: ci/with-rocm-root.sh");
}

#[test]
fn clang_compiles_every_entry_to_wide_global_accesses_without_spills() {
    // What HIP's headers declare, as far as the kernel uses it.
    const PRELUDE: &str = "
        #define __global__ __attribute__((global))
        #define __device__ __attribute__((device))
        #define __launch_bounds__(threads, waves) \\
            __attribute__((amdgpu_flat_work_group_size(1, threads), amdgpu_waves_per_eu(waves)))
        struct Dimension { unsigned x; };
        #define threadIdx (Dimension{__builtin_amdgcn_workitem_id_x()})
        #define blockIdx (Dimension{__builtin_amdgcn_workgroup_id_x()})
        #define gridDim (Dimension{__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()})
    ";
    let prelude = write("clang-19", "prelude.h", PRELUDE.as_bytes());
    for architecture in ["gfx90a", "gfx942", "gfx1100"] {
        let code = prelude.with_file_name(format!("clang-19-{architecture}"));
        let mut clang = Command::new("clang-19");
        clang
            .args(["-x", "hip", "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror"])
            // No ROCm is needed: neither its device libraries nor its headers, nor a bundle.
            .args(["--offload-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc"])
            .arg(format!("--offload-arch={architecture}"))
            .arg("-include")
            .args([&prelude, Path::new(SOURCE)])
            .arg("-o")
            .arg(&code);
        if output("clang-19", &mut clang).is_none() {
            return;
        }
        check_amd(architecture, "clang-19", &code);
    }
}

#[test]
fn nvrtc_compiles_every_entry_to_wide_global_accesses_without_local_memory() {
    let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    let Some(compiler) = RunTimeCompiler::open("nvrtc", "CUBIN", &names) else {
        skip("nvrtc", &format!("none of {} can be opened", names.join(", ")));
        return;
    };
    for architecture in ["sm_80", "sm_90", "sm_100", "sm_120"] {
        let code = write("nvrtc", architecture, &compiler.compile(architecture));
        let mut cuobjdump = Command::new("cuobjdump");
        cuobjdump.args(["-sass", "-res-usage"]).arg(code);
        let Some(text) = output("cuobjdump", &mut cuobjdump) else { return };
        check_nvidia(architecture, &text);
    }
}

/// Asserts what every entry of an AMD code object must show.
fn check_amd(architecture: &str, compiler: &str, code: &Path) {
    let mut disassemble = Command::new("llvm-objdump-19");
    // LLVM 19 does not know gfx950, whose instructions here are those of gfx942: `--mcpu` says so,
    // and one that it cannot decode fails below.
    let decoded_as = if architecture == "gfx950" { "gfx942" } else { architecture };
    disassemble.arg("--disassemble").arg(format!("--mcpu={decoded_as}")).arg(code);
    let Some(disassembly) = output("llvm-19", &mut disassemble) else { return };
    let mut read_notes = Command::new("llvm-readelf-19");
    let Some(notes) = output("llvm-19", read_notes.arg("--notes").arg(code)) else { return };

    assert!(notes.contains(&format!("amdgcn-amd-amdhsa--{architecture}\n")), "{compiler}: {notes}");
    let rdna = architecture.starts_with("gfx1");
    let (load, store) = if rdna {
        ("global_load_b128", "global_store_b128")
    } else {
        ("global_load_dwordx4", "global_store_dwordx4")
    };
    // A SIMD has 512 registers for each lane on CDNA, 1536 on RDNA 3 with waves of 32.
    let (registers, waves) = if rdna { (96, 16) } else { (72, 7) };
    let instructions = amd_instructions(&disassembly);
    let metadata = amd_metadata(&notes);
    let mut used = Vec::new();
    for entry in ENTRIES {
        let place = format!("{compiler}, {architecture}, {entry}");
        let lines = instructions.get(entry).unwrap_or_else(|| panic!("{place}: no code"));
        for line in lines {
            let unwanted = ["flat_", "scratch_", "buffer_", "ds_", "s_swappc", ".long"];
            let found = unwanted.iter().find(|start| line.starts_with(**start));
            assert_eq!(found, None, "{place}: {line}");
        }
        let waits = |line: &str| line.starts_with("s_waitcnt") && line.contains("vmcnt(");
        let in_flight = longest_run(lines, |line| line.starts_with(load), waits);
        assert!(in_flight >= LOADS_IN_FLIGHT, "{place}: {in_flight} loads in flight");
        let stores: Vec<_> = lines.iter().filter(|line| line.starts_with(store)).collect();
        assert!(stores.len() >= LOADS_IN_FLIGHT, "{place}: {} wide stores", stores.len());
        for line in stores {
            // A pair of registers, and no base beside it, is a whole 64-bit address.
            let address = line.split_whitespace().nth(1).unwrap_or_default();
            assert!(address.starts_with("v[") && line.contains(", off"), "{place}: {line}");
        }
        // The last scalar load is that of the next descriptor; no wait for it may come before the
        // words of this one are asked for.
        let next = lines.iter().rposition(|line| line.starts_with("s_load_"));
        let next = next.unwrap_or_else(|| panic!("{place}: no scalar loads"));
        let before_words = lines[next..].iter().take_while(|line| !line.starts_with(load));
        let waited = before_words.filter(|line| line.contains("lgkmcnt(")).count();
        assert!(waited == 0 || entry != "kvferry_copy", "{place}: no descriptor ahead");

        let facts = metadata.get(entry).unwrap_or_else(|| panic!("{place}: no metadata"));
        let number = |key: &str| facts.get(key).map_or(0, |text| text.parse().expect("a number"));
        for key in ["vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"] {
            assert_eq!(facts.get(key).map(String::as_str), Some("0"), "{place}: {key}");
        }
        assert_ne!(facts.get("uses_dynamic_stack").map(String::as_str), Some("true"), "{place}");
        assert_eq!(number("agpr_count"), 0, "{place}: registers of the matrix units");
        let vgprs: u32 = number("vgpr_count");
        assert!(0 < vgprs && vgprs <= registers, "{place}: {vgprs} registers, not {waves} waves");
        used.push(vgprs);
    }
    report(architecture, compiler, &used);
}

/// Asserts what every entry of a cubin must show, in the words of `cuobjdump -sass -res-usage`.
fn check_nvidia(architecture: &str, text: &str) {
    let instructions = sass_instructions(text);
    let resources = cubin_resources(text);
    let mut used = Vec::new();
    for entry in ENTRIES {
        let place = format!("{architecture}, {entry}");
        let lines = instructions.get(entry).unwrap_or_else(|| panic!("{place}: no code"));
        for line in lines {
            let unwanted = ["LD.", "ST.", "LDL", "STL", "LDS", "STS"];
            let found = unwanted.iter().find(|start| line.starts_with(**start));
            assert_eq!(found, None, "{place}: {line}");
            // `.E` is a 64-bit address.
            let global = line.starts_with("LDG") || line.starts_with("STG");
            assert!(!global || line[3..].starts_with(".E"), "{place}: {line}");
        }
        for access in ["LDG.E", "STG.E"] {
            let wide = |line: &&String| line.starts_with(access) && line.contains(".128");
            let count = lines.iter().filter(wide).count();
            assert!(count >= LOADS_IN_FLIGHT, "{place}: {count} wide {access}");
        }
        let facts = resources.get(entry).unwrap_or_else(|| panic!("{place}: no resources"));
        assert_eq!((facts["STACK"], facts["LOCAL"], facts["SHARED"]), (0, 0, 0), "{place}");
        // Of 65536, for 4 blocks on a multiprocessor; 3 of the compact kernel.
        let registers = if entry.contains("compact") { 80 } else { 64 };
        assert!(facts["REG"] <= registers, "{place}: {} registers", facts["REG"]);
        used.push(facts["REG"]);
    }
    report(architecture, "NVRTC", &used);
}

/// Not `println!`, which the harness swallows when the test passes.
fn report(architecture: &str, compiler: &str, registers: &[u32]) {
    let _ = writeln!(
        std::io::stderr(),
        "registers of the kernel's entries, {architecture} by {compiler}: {registers:?}"
    );
}

/// Instructions by function, from `llvm-objdump --disassemble`.
fn amd_instructions(disassembly: &str) -> BTreeMap<&str, Vec<String>> {
    let mut functions = BTreeMap::<_, Vec<String>>::new();
    let mut function = "";
    for line in disassembly.lines() {
        if let Some((_, name)) = line.strip_suffix(">:").and_then(|line| line.split_once('<')) {
            function = name;
        } else if line.starts_with('\t') {
            // Address and encoding follow as a comment.
            let instruction = line.split("//").next().unwrap_or_default().trim();
            functions.entry(function).or_default().push(instruction.to_owned());
        }
    }
    functions
}

/// The fields of each kernel, by its name, from the YAML of `llvm-readelf --notes`; those of its
/// arguments are indented deeper and left out.
fn amd_metadata(notes: &str) -> BTreeMap<String, BTreeMap<&str, String>> {
    let mut kernels = Vec::<BTreeMap<&str, String>>::new();
    for line in notes.lines() {
        if line.starts_with("  - .") {
            kernels.push(BTreeMap::new());
        }
        let field = line.strip_prefix("  - .").or_else(|| line.strip_prefix("    ."));
        let Some((key, value)) = field.and_then(|field| field.split_once(':')) else { continue };
        if let Some(kernel) = kernels.last_mut() {
            kernel.insert(key, value.trim().to_owned());
        }
    }
    kernels.into_iter().filter_map(|kernel| Some((kernel.get("name")?.clone(), kernel))).collect()
}

/// Instructions by function, without the predicate before them, from `cuobjdump -sass`.
fn sass_instructions(text: &str) -> BTreeMap<&str, Vec<String>> {
    let mut functions = BTreeMap::<_, Vec<String>>::new();
    let mut function = "";
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("Function : ") {
            function = name;
        } else if let Some((_, instruction)) = line.split_once("*/").filter(|_| line.contains(" ;"))
        {
            let words = instruction.split_whitespace().skip_while(|word| word.starts_with('@'));
            let words: Vec<_> = words.take_while(|word| *word != ";").collect();
            functions.entry(function).or_default().push(words.join(" "));
        }
    }
    functions
}

/// Numbers by function and name, from `cuobjdump -res-usage`.
fn cubin_resources(text: &str) -> BTreeMap<&str, BTreeMap<&str, u32>> {
    let mut functions = BTreeMap::new();
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        let Some(function) = line.strip_prefix("Function ").and_then(|line| line.strip_suffix(':'))
        else {
            continue;
        };
        let facts = lines.next().unwrap_or_default().split_whitespace();
        let facts = facts.filter_map(|fact| fact.split_once(':'));
        let facts = facts.filter_map(|(name, number)| Some((name, number.parse().ok()?)));
        functions.insert(function, facts.collect());
    }
    functions
}

/// The most lines that are `counted` between two that `end` the run.
fn longest_run(
    lines: &[String],
    counted: impl Fn(&str) -> bool,
    ends: impl Fn(&str) -> bool,
) -> usize {
    let (mut longest, mut run) = (0, 0);
    for line in lines {
        if ends(line) {
            run = 0;
        } else if counted(line) {
            run += 1;
            longest = longest.max(run);
        }
    }
    longest
}

/// The standard output of a program that has to succeed; `None`, after a SKIP line for `name`,
/// where there is no such program.
fn output(name: &str, command: &mut Command) -> Option<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.output() {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => panic!("{program}: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            skip(name, &format!("cannot run {program}: {error}"));
            None
        }
    }
}

fn write(compiler: &str, name: &str, bytes: &[u8]) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel_isa");
    fs::create_dir_all(&directory).expect("a folder for the compiled code");
    let path = directory.join(format!("{compiler}-{name}"));
    fs::write(&path, bytes).expect("room for the compiled code");
    path
}

/// NVRTC or hipRTC, which have the same functions under names of their own.
struct RunTimeCompiler {
    library: Library,
    prefix: &'static str,
    /// What they call the code for a device.
    code: &'static str,
}

type Program = *mut c_void;
type Texts = *const *const c_char;
type Create =
    unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Texts, Texts) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, Texts) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type GetSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut u8) -> c_int;

impl RunTimeCompiler {
    fn open(prefix: &'static str, code: &'static str, names: &[&str]) -> Option<Self> {
        // SAFETY: opening a vendor's library runs its constructors, which need no GPU.
        let library = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        // The stand-in of crates/hip-shim makes no code for a GPU.
        // SAFETY: only looked up.
        let is_real = unsafe { library.get::<fn()>(b"kvferry_hip_shim_fail") }.is_err();
        is_real.then_some(Self { library, prefix, code })
    }

    /// The copy kernel, compiled with the options that the backends give.
    fn compile(&self, architecture: &str) -> Vec<u8> {
        let source = CString::new(fs::read_to_string(SOURCE).expect("the kernel's source"))
            .expect("a text without zeros");
        let option = CString::new(format!("--gpu-architecture={architecture}")).expect("a name");
        let options = [option.as_ptr(), c"--std=c++17".as_ptr()];
        let mut program: Program = ptr::null_mut();
        // SAFETY: the signatures are those of both compilers' headers; texts end with a zero and
        // outlive the calls; the program is used only while it exists.
        unsafe {
            let create: Create = self.function("CreateProgram");
            let (text, file) = (source.as_ptr(), c"copy.cu".as_ptr());
            let created = create(&mut program, text, file, 0, ptr::null(), ptr::null());
            assert_eq!(created, 0, "{}CreateProgram", self.prefix);
            let compile: Compile = self.function("CompileProgram");
            let compiled = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.get(program, "ProgramLog");
            assert_eq!(compiled, 0, "{architecture}: {}", String::from_utf8_lossy(&log));
            let code = self.get(program, self.code);
            let destroy: Destroy = self.function("DestroyProgram");
            assert_eq!(destroy(&mut program), 0, "{}DestroyProgram", self.prefix);
            code
        }
    }

    /// What `Get{what}` gives.
    ///
    /// # Safety
    /// The program exists.
    unsafe fn get(&self, program: Program, what: &str) -> Vec<u8> {
        let mut len = 0;
        // SAFETY: the signatures are those of the headers; the program exists by the caller's
        // word; the compiler writes one number, then as many bytes as that said.
        unsafe {
            let size: GetSize = self.function(&format!("Get{what}Size"));
            assert_eq!(size(program, &mut len), 0, "{}Get{what}Size", self.prefix);
            let mut bytes = vec![0; len];
            let get: Get = self.function(&format!("Get{what}"));
            assert_eq!(get(program, bytes.as_mut_ptr()), 0, "{}Get{what}", self.prefix);
            bytes
        }
    }

    /// # Safety
    /// `T` is the signature of that function.
    unsafe fn function<T: Copy>(&self, name: &str) -> T {
        let name = format!("{}{name}", self.prefix);
        // SAFETY: the caller's word; the library stays open with `self`.
        *unsafe { self.library.get(name.as_bytes()) }
            .unwrap_or_else(|error| panic!("{name}: {error}"))
    }
}
