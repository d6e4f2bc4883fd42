// Static shared memory is thread-local storage of this library, and so are a few variables of the emulator.
#include "runtime.h"

#include <link.h>

namespace emu {

namespace {

struct Storage {
    Address inside;  // an address in this library
    char* start;
    size_t bytes;
};

int look(dl_phdr_info* library, size_t, void* context) {
    auto* storage = static_cast<Storage*>(context);
    bool here = false;
    size_t bytes = 0;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const auto& segment = library->dlpi_phdr[i];
        const Address start = library->dlpi_addr + segment.p_vaddr;
        if (segment.p_type == PT_LOAD) here |= storage->inside >= start && storage->inside < start + segment.p_memsz;
        if (segment.p_type == PT_TLS) bytes = segment.p_memsz;
    }
    if (!here) return 0;
    storage->start = static_cast<char*>(library->dlpi_tls_data);
    storage->bytes = storage->start ? bytes : 0;
    return 1;
}

}  // namespace

StaticShared static_shared() {
    Storage storage{Address(&static_shared), nullptr, 0};
    dl_iterate_phdr(look, &storage);
    return {storage.start, storage.bytes};
}

void wipe_static_shared() {
    const StaticShared storage = static_shared();
    const int device = current_device();
    memset(storage.start, 0xff, storage.bytes);
    set_current_device(device);
}

}  // namespace emu
