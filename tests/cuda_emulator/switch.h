// Switching between stacks: a few instructions on x86-64, ucontext elsewhere (and with EMU_UCONTEXT, to try it).
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)

using StackPointer = void*;

// Saves the registers a callee must keep and continues where `load` was saved.
extern "C" __attribute__((visibility("hidden"))) void emu_switch_stack(void** save, void* load);

inline void switch_stack(StackPointer* save, StackPointer load) { emu_switch_stack(save, load); }

// A stack on which the first switch enters `entry`, which must not return.
inline StackPointer fresh_stack(char* top, void (*entry)()) {
    auto** words = reinterpret_cast<void**>(uintptr_t(top) & ~uintptr_t(63));
    *--words = nullptr;  // where entry's return address would be: keeps the alignment the ABI promises
    *--words = reinterpret_cast<void*>(entry);
    return words - 6;
}

#else

}  // namespace emu
#include <ucontext.h>
namespace emu {

using StackPointer = ucontext_t*;

// Each saved context lies on the stack it belongs to.
inline void switch_stack(StackPointer* save, StackPointer load) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, load);
}

inline StackPointer fresh_stack(char* top, void (*entry)()) {
    auto* context = reinterpret_cast<ucontext_t*>((uintptr_t(top) - sizeof(ucontext_t)) & ~uintptr_t(63));
    getcontext(context);
    context->uc_stack.ss_sp = reinterpret_cast<char*>(context) - 64 * 1024;
    context->uc_stack.ss_size = 64 * 1024;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}

#endif

}  // namespace emu
