// Modules and launches. A module is given the PTX that a GPU would get; its entry table is held against the
// host build, whose kernels are what runs.
#include "runtime.h"

#include <fstream>
#include <map>
#include <set>
#include <sstream>

namespace emu {

namespace {

std::vector<Kernel>& registry() {
    static auto* kernels = new std::vector<Kernel>;
    return *kernels;
}

const Kernel* kernel_named(const std::string& name) {
    for (const Kernel& kernel : registry())
        if (name == kernel.name) return &kernel;
    return nullptr;
}

struct Module;
struct Function {
    const Kernel* kernel;
    int device;
    size_t dynamic_limit;
};
struct Module {
    int device;
    std::map<std::string, Function> functions;
};
std::set<Module*> modules;
std::set<Function*> functions;

// ---- PTX: `.entry NAME ( .param .TYPE name, .param .align N .bK name[SIZE], ... )`.

using EntryTable = std::map<std::string, std::vector<size_t>>;

std::string without_comments(const std::string& text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        if (!text.compare(i, 2, "//")) {
            i = text.find('\n', i);
        } else if (!text.compare(i, 2, "/*")) {
            const size_t end = text.find("*/", i);
            i = end == std::string::npos ? end : end + 2;
        } else {
            out += text[i++];
            continue;
        }
        if (i == std::string::npos) break;
        out += ' ';
    }
    return out;
}

// `.param .u64 .ptr .global .align 1 name` or `.param .align 4 .b8 name[12]`: the element type is the first
// word that ends in its number of bits.
size_t parameter_size(const std::string& declaration) {
    std::istringstream words(declaration);
    size_t element = 0, count = 1;
    for (std::string word; words >> word;) {
        const size_t digits = word.find_first_of("0123456789");
        if (word[0] == '.' && word.size() > 2 && digits == 2 && strchr("usbf", word[1])) element = size_t(atoi(word.c_str() + 2)) / 8;
        const size_t bracket = word.find('[');
        if (bracket != std::string::npos) count = size_t(atoi(word.c_str() + bracket + 1));
    }
    return element * count;
}

EntryTable entries_of(const std::string& ptx) {
    EntryTable table;
    const std::string text = without_comments(ptx);
    for (size_t at = text.find(".entry"); at != std::string::npos; at = text.find(".entry", at + 1)) {
        const size_t name = text.find_first_not_of(" \t\r\n", at + 6), name_end = text.find_first_of(" \t\r\n({", name);
        if (name_end == std::string::npos) break;
        auto& sizes = table[text.substr(name, name_end - name)];
        const size_t open = text.find_first_not_of(" \t\r\n", name_end);
        if (open == std::string::npos || text[open] != '(') continue;
        const std::string list = text.substr(open + 1, text.find(')', open) - open - 1);
        for (size_t param = list.find(".param"); param != std::string::npos;) {
            const size_t next = list.find(".param", param + 1);
            sizes.push_back(parameter_size(list.substr(param + 6, next == std::string::npos ? next : next - param - 6)));
            param = next;
        }
    }
    return table;
}

std::string listed(const size_t* sizes, size_t count) {
    std::string text = "(";
    for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
    return text + ")";
}

int load(Module& module, const std::string& ptx) {
    const EntryTable table = entries_of(ptx);
    if (table.empty()) {
        report("module: no .entry in the image");
        return INVALID_PTX;
    }
    int code = SUCCESS;
    for (const auto& [name, sizes] : table) {
        const Kernel* kernel = kernel_named(name);
        if (!kernel) {
            report(format("module: entry %s of the PTX is missing in the host build: the PTX is out of date", name.c_str()));
            code = INVALID_PTX;
            continue;
        }
        if (sizes != std::vector<size_t>(kernel->sizes, kernel->sizes + kernel->count)) {
            report("module: entry " + name + " has parameters of " + listed(sizes.data(), sizes.size()) + " bytes in the PTX and of " +
                   listed(kernel->sizes, size_t(kernel->count)) + " in the host build: the PTX is out of date");
            code = INVALID_PTX;
            continue;
        }
        module.functions[name] = {kernel, module.device, 48 * 1024};
    }
    return code;
}

}  // namespace

void register_kernel(const Kernel& kernel) { registry().push_back(kernel); }
const std::vector<Kernel>& kernels() { return registry(); }

}  // namespace emu

using namespace emu;

// A PTX text with the entry table of one kernel file and no code: for tests of kernels that have no PTX yet.
EMU_API size_t emu_ptx_of(const char* file, char* text, size_t room) {
    std::string ptx = ".version 7.0\n.target sm_80\n.address_size 64\n";
    for (const Kernel& kernel : kernels()) {
        if (strcmp(kernel.file, file) != 0) continue;
        ptx += std::string(".visible .entry ") + kernel.name + "(";
        for (int i = 0; i < kernel.count; ++i) ptx += (i ? ", " : "") + format(".param .b8 p%d[%zu]", i, kernel.sizes[i]);
        ptx += ")\n{ ret; }\n";
    }
    if (ptx.size() < room) memcpy(text, ptx.c_str(), ptx.size() + 1);
    return ptx.size();
}

EMU_API int cuModuleLoadData(void** handle, const void* image) {
    Locked hold(driver_lock());
    if (current_device() < 0) return INVALID_CONTEXT;
    if (int code = sticky(current_device())) return code;
    if (refused_in_capture("loading a module")) return CAPTURE_UNSUPPORTED;
    if (!memcmp(image, "\177ELF", 4) || !memcmp(image, "\x50\xed\x55\xba", 4)) {
        report("module: the image is machine code; the emulator reads PTX only");
        return NO_BINARY_FOR_GPU;
    }
    if (driver_lacks_memory(current_device())) return OUT_OF_MEMORY;
    std::unique_ptr<Module> module(new Module{current_device(), {}});
    if (int code = load(*module, static_cast<const char*>(image))) return code;
    for (auto& [name, function] : module->functions) functions.insert(&function);
    modules.insert(module.get());
    *handle = module.release();
    return SUCCESS;
}
EMU_API int cuModuleLoadDataEx(void** handle, const void* image, unsigned, int*, void**) { return cuModuleLoadData(handle, image); }
EMU_API int cuModuleLoad(void** handle, const char* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return FILE_NOT_FOUND;
    std::stringstream text;
    text << file.rdbuf();
    return cuModuleLoadData(handle, text.str().c_str());
}
EMU_API int cuModuleUnload(void* handle) {
    Locked hold(driver_lock());
    auto* module = static_cast<Module*>(handle);
    if (!modules.erase(module)) return INVALID_HANDLE;
    for (auto& [name, function] : module->functions) functions.erase(&function);
    delete module;
    return SUCCESS;
}
EMU_API int cuModuleGetFunction(void** handle, void* module_handle, const char* name) {
    Locked hold(driver_lock());
    auto* module = static_cast<Module*>(module_handle);
    if (!modules.count(module)) return INVALID_HANDLE;
    const auto found = module->functions.find(name);
    if (found == module->functions.end()) return NOT_FOUND;
    *handle = &found->second;
    return SUCCESS;
}

EMU_API int cuFuncSetAttribute(void* handle, int attribute, int value) {
    Locked hold(driver_lock());
    auto* function = static_cast<Function*>(handle);
    if (!functions.count(function)) return INVALID_HANDLE;
    if (refused_in_capture("changing an attribute of a function")) return CAPTURE_UNSUPPORTED;
    if (attribute == 8) {  // dynamic shared memory
        if (value < 0 || value > 99 * 1024) return INVALID_VALUE;
        function->dynamic_limit = size_t(value);
    }
    return SUCCESS;
}
EMU_API int cuFuncGetAttribute(int* value, int attribute, void* handle) {
    Locked hold(driver_lock());
    auto* function = static_cast<Function*>(handle);
    if (!functions.count(function)) return INVALID_HANDLE;
    *value = attribute == 0 ? 1024 : attribute == 8 ? int(function->dynamic_limit) : 0;
    return SUCCESS;
}
EMU_API int cuFuncSetCacheConfig(void*, int) { return SUCCESS; }
EMU_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, size_t) {
    *blocks = threads > 0 ? 2048 / threads : 0;
    return SUCCESS;
}
EMU_API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void* function, int threads, size_t dynamic, unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, dynamic);
}

// ---- Launches.

namespace {

// The parameters' values, copied when the kernel is launched, as the driver does.
struct Parameters {
    std::vector<char> bytes;
    std::vector<void*> places;
    Parameters(const Kernel& kernel, void** values) {
        size_t total = 0;
        for (int i = 0; i < kernel.count; ++i) total += (kernel.sizes[i] + 15) / 16 * 16;
        bytes.resize(total);
        char* at = bytes.data();
        for (int i = 0; i < kernel.count; ++i) {
            memcpy(at, values[i], kernel.sizes[i]);
            places.push_back(at);
            at += (kernel.sizes[i] + 15) / 16 * 16;
        }
    }
};

int refuse(int code, const Kernel& kernel, const std::string& why) {
    report(format("launch of %s: ", kernel.name) + why);
    return code;
}

void run(const Launch& launch) {
    // A host pointer would work here and fault on a GPU.
    for (int i = 0; i < launch.kernel->count; ++i) {
        if (!launch.kernel->pointers[i]) continue;
        Address value;
        memcpy(&value, launch.arguments[i], sizeof value);
        if (known_address(value)) continue;
        report(format("parameter %d points at 0x%llx, which is neither device nor pinned memory: kernel %s", i, value, launch.kernel->name));
        return make_sticky(launch.device, ILLEGAL_ADDRESS);
    }
    open_for(launch.device);
    run_kernel(launch);
    // Small overruns stay inside the slack behind an allocation: look at those the kernel was given.
    for (int i = 0; i < launch.kernel->count; ++i) {
        if (!launch.kernel->pointers[i]) continue;
        Address value;
        memcpy(&value, launch.arguments[i], sizeof value);
        const Allocation* allocation = holding(value, 0);
        if (allocation && !canaries_whole(*allocation, format("found after kernel %s", launch.kernel->name).c_str()))
            make_sticky(launch.device, ILLEGAL_ADDRESS);
    }
}

}  // namespace

EMU_API int cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                           unsigned dynamic, void* stream_handle, void** values, void** extra) {
    Locked hold(driver_lock());
    auto* function = static_cast<Function*>(handle);
    if (!functions.count(function)) {
        report("launch of a function whose module has been unloaded, or that never was one");
        return INVALID_HANDLE;
    }
    Stream* stream = stream_of(stream_handle);
    const Kernel& kernel = *function->kernel;
    if (!stream) return refuse(INVALID_HANDLE, kernel, "no such stream");
    if (int code = sticky(device_of(stream))) return code;
    if (device_of(stream) != function->device)
        return refuse(INVALID_HANDLE, kernel, format("its module belongs to device %d, the stream to device %d", function->device, device_of(stream)));
    if (!gx || !gy || !gz || gx > 2147483647u || gy > 65535 || gz > 65535) return refuse(INVALID_VALUE, kernel, format("grid (%u,%u,%u)", gx, gy, gz));
    if (!bx || !by || !bz || bx > 1024 || by > 1024 || bz > 64 || uint64_t(bx) * by * bz > 1024)
        return refuse(INVALID_VALUE, kernel, format("block (%u,%u,%u)", bx, by, bz));
    if (dynamic > function->dynamic_limit)
        return refuse(INVALID_VALUE, kernel, format("%u bytes of dynamic shared memory, the limit set is %zu", dynamic, function->dynamic_limit));
    if (extra) return refuse(NOT_SUPPORTED, kernel, "parameters in a buffer");
    if (kernel.count && !values) return refuse(INVALID_VALUE, kernel, "no parameters");
    for (int i = 0; i < kernel.count; ++i)
        if (!values[i]) return refuse(INVALID_VALUE, kernel, format("parameter %d is a null pointer", i));
    auto parameters = std::make_shared<Parameters>(kernel, values);
    const Kernel* what = &kernel;
    const int device = function->device;
    return submit(stream, [=] { run({what, parameters->places.data(), {gx, gy, gz}, {bx, by, bz}, dynamic, device, order()}); });
}
