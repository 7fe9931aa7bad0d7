// The kernels of copy.cu, by the entries that its host build has instead of them.

static void hip_shim_copy(const CopyDescriptor* descriptors, u32 count) {
    kvferry_copy_host(descriptors, count, gridDim.x, HIP_SHIM_LANES);
}

static void hip_shim_copy_claimed(const CopyDescriptor* descriptors, u32 count, Claims claims) {
    kvferry_copy_claimed_host(descriptors, count, &claims, gridDim.x, HIP_SHIM_LANES);
}

template <typename List>
static void hip_shim_copy_list(List list) {
    kvferry_copy_host(list.list, static_cast<u32>(list.count), gridDim.x, HIP_SHIM_LANES);
}

template <typename List>
static void hip_shim_copy_compact(List list) {
    kvferry_copy_compact_host(list.list, static_cast<u32>(list.count), gridDim.x, HIP_SHIM_LANES);
}

HIP_SHIM_ENTRY(kvferry_copy, hip_shim_copy, run_whole)
HIP_SHIM_ENTRY(kvferry_copy_claimed, hip_shim_copy_claimed, run_whole)
HIP_SHIM_ENTRY(kvferry_copy_inline, hip_shim_copy_list<InlineList>, run_whole)
HIP_SHIM_ENTRY(kvferry_copy_inline_few, hip_shim_copy_list<InlineFewList>, run_whole)
HIP_SHIM_ENTRY(kvferry_copy_compact, hip_shim_copy_compact<CompactList>, run_whole)
HIP_SHIM_ENTRY(kvferry_copy_compact_few, hip_shim_copy_compact<CompactFewList>, run_whole)
