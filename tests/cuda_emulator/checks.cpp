// What the checked build's instrumentation (-fsanitize=bounds,alignment) calls, in place of its usual library:
// such an error is the device's, with kernel, block and thread.
#include "runtime.h"

namespace {

struct Place {
    const char* file;
    uint32_t line, column;
};
struct Type {
    uint16_t kind, info;
    char name[1];
};
struct OutOfBounds {
    Place place;
    const Type *array, *index;
};
struct TypeMismatch {
    Place place;
    const Type* type;
    unsigned char log_alignment, kind;
};

std::string at(const Place& place) {
    const char* slash = strrchr(place.file, '/');
    return emu::format(" at %s:%u", slash ? slash + 1 : place.file, place.line);
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds(OutOfBounds* what, uintptr_t index) {
    emu::fault(emu::ILLEGAL_ADDRESS, (emu::format("index %lld outside %s", (long long)index, what->array->name) + at(what->place)).c_str());
}

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(TypeMismatch* what, uintptr_t address) {
    const unsigned alignment = 1u << what->log_alignment;
    if (address % alignment == 0) return;  // a null pointer, which faults by itself
    emu::fault(emu::MISALIGNED_ADDRESS, (emu::format("address 0x%llx of %s is not aligned to %u bytes", (unsigned long long)address, what->type->name, alignment) + at(what->place)).c_str());
}
