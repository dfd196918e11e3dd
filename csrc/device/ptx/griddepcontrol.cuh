// griddepcontrol: orders a launch that may begin early (Launch::is_dependent) after the launch before it.
// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once

namespace fastattn::ptx {

// Waits until the previous launch has ended and this thread sees its writes. Every thread that reads these writes must
// call it, and must not read them by __ldg(), which is for memory that no one writes while the kernel runs. Does
// nothing in code for architectures before sm_90, which is never launched early.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next launch to begin, if it is dependent and SMs have room, once all CTAs of this launch have called this
// or ended. It publishes nothing: the next launch still has to wait. A launch that is dependent itself must wait
// before, if the next launch reads anything of earlier launches before its own wait.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fastattn::ptx
