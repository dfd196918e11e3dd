// griddepcontrol: orders a launch that may begin early (Launch::is_dependent) after the launch before it.
// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once

namespace fastattn::ptx {

// Waits until the previous launch has ended and this thread sees its writes. Every thread that reads these writes must
// call it.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Allows the next launch to begin, if it is dependent and SMs have room, once all CTAs of this launch have called this
// or ended. It publishes nothing: the next launch still has to wait.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fastattn::ptx
