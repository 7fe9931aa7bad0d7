//! Which NUMA node a device is at, and host memory that is bound to it.

use std::path::Path;

use crate::device::DeviceInfo;

/// Makes the kernel take the pages of `[addr, addr + len)`, which begins on a page and was not
/// touched yet, from the memory of the device's NUMA node as long as it has some, whichever thread
/// or process touches them first. Does nothing for a device at no particular node, or on a machine
/// that has one.
///
/// # Errors
/// The system's word, as where a container's rules forbid the call. The memory is as good as before.
pub fn bind_near(addr: u64, len: u64, device: &DeviceInfo) -> Result<(), String> {
    let node = device.pci_bus_id.as_deref().and_then(|pci| node_of(Path::new("/sys"), pci));
    node.map_or(Ok(()), |node| bind(addr, len, node))
}

/// The NUMA node of a PCI address; none on a machine with one node, or where it is not known.
fn node_of(sys: &Path, pci_bus_id: &str) -> Option<u32> {
    if !sys.join("devices/system/node/node1").exists() {
        return None;
    }
    let file = sys.join("bus/pci/devices").join(pci_bus_id.to_lowercase()).join("numa_node");
    // It says -1 where the firmware does not tell.
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Nodes that the kernel's list has bits for.
const MOST_NODES: u32 = 1024;

fn bind(addr: u64, len: u64, node: u32) -> Result<(), String> {
    let mut nodes = [0u64; (MOST_NODES / u64::BITS) as usize];
    let word = nodes.get_mut((node / u64::BITS) as usize);
    *word.ok_or(format!("NUMA node {node} is not one of {MOST_NODES}"))? |= 1 << (node % u64::BITS);
    // Preferred, not bound: a node that is full gives memory of another one, where the other policy
    // would end the process at its first touch.
    // SAFETY: it changes no byte and no mapping, only where the kernel takes pages from. `nodes` is
    // as long as its length says, plus the bit that the kernel does not count.
    let bound = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            addr,
            len,
            libc::MPOL_PREFERRED,
            nodes.as_ptr(),
            u64::from(MOST_NODES) + 1,
            0,
        )
    };
    if bound == 0 {
        return Ok(());
    }
    Err(format!("mbind to NUMA node {node} failed: {}", std::io::Error::last_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_of_a_device_is_read_where_there_are_several() {
        let sys = tempfile::tempdir().expect("a folder");
        let device = sys.path().join("bus/pci/devices/0000:af:00.0");
        std::fs::create_dir_all(&device).expect("creates");
        let node = || node_of(sys.path(), "0000:AF:00.0");
        std::fs::write(device.join("numa_node"), "1\n").expect("writes");
        assert_eq!(node(), None, "one node is all there is");
        std::fs::create_dir_all(sys.path().join("devices/system/node/node1")).expect("creates");
        assert_eq!(node(), Some(1));
        std::fs::write(device.join("numa_node"), "-1\n").expect("writes");
        assert_eq!(node(), None, "the firmware does not tell");
        assert_eq!(node_of(sys.path(), "0000:00:00.0"), None);
    }

    #[test]
    fn memory_is_bound_or_the_refusal_is_said_and_it_works_all_the_same() {
        let memory = crate::software::SharedMemory::default();
        let addr = memory.allocate(1 << 20).expect("memory");
        if let Err(reason) = bind(addr, 1 << 20, 0) {
            crate::conformance::skip("mbind", &reason);
        }
        for node in [MOST_NODES - 1, MOST_NODES] {
            let refused = bind(addr, 1 << 20, node);
            assert!(refused.is_err_and(|reason| reason.contains(&format!("node {node}"))));
        }
        // SAFETY: allocated above.
        unsafe { (addr as *mut u8).write_bytes(7, 1 << 20) };
    }
}
