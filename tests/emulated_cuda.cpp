// A device called cuda on a CPU build of torch; emulated_cuda.py says what it shows. Its storages lie in host memory, each
// behind a header, and a boxed fallback runs the CPU kernel of every operator on aliases of the same bytes.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <deque>
#include <mutex>

using namespace c10;
using at::Tensor, at::OperatorHandle;

// The default stream, 0, runs at once. On another stream a copy between the device and pinned memory waits in a queue
// until somebody waits for it, as late as a GPU may be; other operators run at once, behind what is queued there. The
// default stream's time is counted in operators; another stream has seen it up to the last event that it waited for.

constexpr size_t HEADER = 64;
struct Block {  // stands before the bytes of a storage
  size_t n_bytes;
  int64_t stream, written, used;  // where it was allocated; times of the default stream's last write and last use
  int64_t n_arriving, n_leaving;  // queued copies to it and from it
};
struct Copy {  // it holds the host's memory, as torch's allocator of pinned memory does
  void* target;
  const void* source;
  size_t n_bytes;
  int64_t* n_pending;  // of the block
  Storage host;
};
struct Queue {  // of a stream
  std::deque<Copy> copies;
  int64_t n_done = 0, seen = 0;
  std::vector<Block*> freed;  // allocated here, for the next operator here to use again
  int64_t freed_used = 0;     // last use of them by the default stream
};
struct Mark {  // of an event: what its stream has issued, and has seen of the default stream
  int64_t stream, n_issued, seen;
};
extern "C" int64_t emu_live = 0, emu_peak = 0, emu_limit = INT64_MAX, emu_device = 0, emu_strict = 0;
static std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
static std::deque<Queue> queues(1);       // of the default stream first
static int64_t& now = queues[0].seen;     // of the default stream
static thread_local int64_t current = 0;  // stream

static Mark mark(int64_t stream) {
  Lock lock(mutex);
  Queue& queue = queues[stream];
  return {stream, queue.n_done + (int64_t)queue.copies.size(), queue.seen};
}

static void wait(Queue& waiting, const Mark& mark) {
  for (Queue& queue = queues[mark.stream]; queue.n_done < mark.n_issued; queue.n_done++) {
    Copy& copy = queue.copies.front();
    memcpy(copy.target, copy.source, copy.n_bytes);
    --*copy.n_pending;
    queue.copies.pop_front();
  }
  waiting.seen = std::max(waiting.seen, mark.seen);
}

static void start() {  // of an operator on the current stream, which may be given memory that was freed there
  Lock lock(mutex);
  Queue& queue = queues[current];
  wait(queue, mark(current));
  if (!current) now++;
  std::erase_if(queue.freed, [](Block* block) {
    memset((char*)block + HEADER, 0xFF, block->n_bytes);  // nan, -1 in integers
    const bool done = !block->n_arriving && !block->n_leaving;
    if (done) free(block);
    return done;
  });
}

static void host_waits(const Mark& mark) {  // what is issued from here on comes after it on any stream
  Lock lock(mutex);
  for (Queue& queue : queues) wait(queue, mark);
}

static void host_waits(const std::string& why, int64_t stream = current) {  // torch.cuda.set_sync_debug_mode tells of it
  TORCH_CHECK(!emu_strict, "the host waits for the device: ", why);
  host_waits(mark(stream));
}

static Device device() { return {DeviceType::CUDA, (DeviceIndex)emu_device}; }
static Block* block_of(const Tensor& t) { return (Block*)((char*)t.storage().data() - HEADER); }
static void touch(const Tensor& t, bool writes) {
  if (!t.storage().data()) return;
  Lock lock(mutex);
  Block* block = block_of(t);
  if (current) {
    int64_t last = writes ? block->used : block->written;
    TORCH_CHECK(last <= queues[current].seen, "a side stream touches memory that the default stream still works on");
    return;
  }
  TORCH_CHECK(!block->n_arriving && !(writes && block->n_leaving), "memory is used while a copy is under way");
  block->used = now;
  if (writes) block->written = now;
}

struct Memory : Allocator {
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static struct DeviceMemory final : Memory {
  static void release(void* data) {
    if (!data) return;
    Lock lock(mutex);
    auto block = (Block*)((char*)data - HEADER);
    emu_live -= block->n_bytes;
    Queue& queue = queues[block->stream];
    queue.freed_used = std::max(queue.freed_used, block->used);
    queue.freed.push_back(block);
  }
  DataPtr allocate(size_t n) override {
    Lock lock(mutex);
    if (!n) return {nullptr, nullptr, &release, device()};
    const size_t n_bytes = (n + 511) / 512 * 512;
    TORCH_CHECK_WITH(OutOfMemoryError, emu_live + (int64_t)n_bytes <= emu_limit, "CUDA out of memory: ", n, " more");
    TORCH_CHECK(!current || queues[current].freed_used <= queues[current].seen,
                "memory of a side stream is given away again while the default stream may still use it");
    start();
    auto block = (Block*)aligned_alloc(HEADER, HEADER + n_bytes);
    *block = {n_bytes, current, current ? 0 : now, current ? 0 : now, 0, 0};
    emu_live += n_bytes;
    emu_peak = std::max(emu_peak, emu_live);
    void* data = memset((char*)block + HEADER, 0xFF, n_bytes);
    return {data, data, &release, device()};
  }
} device_memory;
static struct PinnedMemory final : Memory {  // one range of addresses, none of which is used twice
  const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* const first = (char*)mmap(nullptr, 1L << 38, PROT_READ | PROT_WRITE, how, -1, 0);
  std::atomic<size_t> used = 0;
  DataPtr allocate(size_t n) override {
    char* data = first + used.fetch_add((n / HEADER + 1) * HEADER);
    return {data, data, [](void*) {}, Device(kCPU)};
  }
  bool holds(const void* data) const { return first <= data && data < first + used; }
} pinned_memory;

// ---------------------------------------------------------------- what torch's core asks of a device

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  DeviceIndex deviceCount() const noexcept override { return emu_device + 1; }
  c10::Stream getStream(Device) const noexcept override { return stream(current); }
  c10::Stream exchangeStream(c10::Stream other) const noexcept override {
    return stream(std::exchange(current, other.id()));
  }
  c10::Stream getNewStream(Device, int) const override {
    Lock lock(mutex);
    queues.emplace_back();
    return stream(queues.size() - 1);
  }
  void record(void** at, const c10::Stream& stream, DeviceIndex, EventFlag) const override {
    destroyEvent(*at, 0);
    *at = new Mark(mark(stream.id()));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (Mark*)event; }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex);
    wait(queues[stream.id()], *(Mark*)event);
  }
  void synchronizeEvent(void* event) const override { host_waits(*(Mark*)event); }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits("a stream", stream.id()); }
  void synchronizeDevice(DeviceIndex) const override {
    for (size_t i = 0; i < queues.size(); i++) host_waits(mark(i));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at {  // where the macro looks for it
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(0); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.holds(data); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// ---------------------------------------------------------------- operators

static Tensor like(const Tensor& t, Storage storage, DispatchKey key) {
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (!t.dim()) out.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());
  return out;
}

static Tensor on_cpu(const Tensor& t) {  // the same bytes as a CPU tensor, which keeps the storage
  if (!t.is_cuda()) return t;
  auto keep = new Storage(t.storage());
  DataPtr data(keep->mutable_data(), keep, [](void* storage) { delete (Storage*)storage; }, Device(kCPU));
  return like(t, Storage({}, keep->nbytes(), std::move(data), c10::GetAllocator(kCPU), true), DispatchKey::CPU);
}

static Storage on_device(const Storage& cpu, bool filled = true) {
  Storage storage({}, cpu.nbytes(), device_memory.allocate(cpu.nbytes()), &device_memory, true);
  if (filled && cpu.nbytes()) memcpy(storage.mutable_data(), cpu.data(), cpu.nbytes());
  return storage;
}

struct Call {  // of a CPU kernel in place of CUDA's
  const std::string& name;
  std::vector<std::pair<Tensor, Tensor>> aliases = {};  // on the device, on the CPU
  bool creates = false;                                 // on the device, from nothing
  std::string other = "";                               // shape of a tensor that a CUDA kernel would refuse

  template <class F>
  static IValue each(const IValue& value, F change) {
    if (value.isTensor()) return change(value.toTensor());
    if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
    c10::List<IValue> list = value.toList(), out(list.elementType());
    for (const IValue& element : list) out.push_back(each(element, change));
    return out;
  }

  IValue given(const IValue& value, const c10::AliasInfo* alias) {
    const bool indices = value.isOptionalTensorList();  // which may be on the CPU
    if (value.isDevice() && value.toDevice().is_cuda()) creates = true;
    if (value.isDevice()) return Device(kCPU);
    return each(value, [&](const Tensor& t) {
      if (t.defined() && !t.is_cuda() && t.dim() && !indices) other = c10::str(t.sizes());
      if (!t.defined() || !t.is_cuda()) return t;
      if (indices && t.scalar_type() == kBool) host_waits("a mask as an index");
      if (!alias || alias->isWrite()) touch(t, alias);  // and not where only a view is made
      aliases.emplace_back(t, on_cpu(t));
      return aliases.back().second;
    });
  }

  Tensor returned(const Tensor& cpu) {
    if (!cpu.defined() || cpu.is_cuda() || (aliases.empty() && !creates)) return cpu;
    for (auto& [tensor, alias] : aliases) {
      if (!alias.is_same(cpu)) continue;  // in place, or out=, which may have a new size
      auto impl = tensor.unsafeGetTensorImpl();
      if (cpu.storage().data() != tensor.storage().data()) impl->set_storage_keep_dtype(on_device(cpu.storage()));
      if (cpu.sizes() != tensor.sizes()) impl->set_sizes_contiguous(cpu.sizes());
      return tensor;
    }
    for (auto& [tensor, _] : aliases)  // a view
      if (cpu.storage().data() && cpu.storage().data() == tensor.storage().data())
        return like(cpu, tensor.storage(), DispatchKey::CUDA);
    Tensor result = like(cpu, on_device(cpu.storage(), name.rfind("aten::empty", 0)), DispatchKey::CUDA);
    touch(result, true);
    return result;
  }
};

static void on_cpu_kernel(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  for (auto name : {"aten::nonzero", "aten::equal", "aten::_local_scalar_dense"})
    if (schema.name() == name) host_waits(name);
  start();
  Call call{schema.name()};
  const auto given = torch::jit::pop(*stack, schema.arguments().size());
  for (size_t i = 0; i < given.size(); i++)
    stack->push_back(call.given(given[i], schema.arguments()[i].alias_info()));
  TORCH_CHECK(call.other.empty() || call.aliases.empty(),
              "Expected all tensors to be on the same device: ", schema.name(), " got cuda and cpu ", call.other);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(*stack);
  }
  for (const auto& value : torch::jit::pop(*stack, schema.returns().size()))
    stack->push_back(Call::each(value, [&](const Tensor& t) { return call.returned(t); }));
}

static Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  const bool to_device = to.is_cuda(), crosses = to_device != from.is_cuda();
  const Tensor &host = to_device ? from : to, &device = to_device ? to : from;
  const bool same = to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.is_contiguous() && from.is_contiguous();
  const bool later = current && crosses && non_blocking && same && to.nbytes() && pinned_memory.holds(host.data_ptr());
  if (crosses && !to_device && !non_blocking) host_waits("a copy to the host");
  if (!later) start();
  if (to_device) touch(to, true);
  if (from.is_cuda()) touch(from, false);
  if (!later) on_cpu(to).copy_(on_cpu(from));
  if (!later) return to;
  Lock lock(mutex);
  int64_t* n_pending = to_device ? &block_of(device)->n_arriving : &block_of(device)->n_leaving;
  ++*n_pending;
  queues[current].copies.push_back({to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), n_pending, host.storage()});
  return to;
}

static void resize_storage(int64_t address, int64_t n_bytes) {  // UntypedStorage.resize_, which torch has for CUDA alone
  auto impl = (c10::StorageImpl*)address;
  impl->set_data_ptr_noswap(device_memory.allocate(n_bytes));  // FSDP2 asks for no content
  impl->set_nbytes(n_bytes);
}

static auto boxed() { return torch::CppFunction::makeFromBoxedFunction<&on_cpu_kernel>(); }
TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(boxed()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", copy);
  library.impl("silu_backward", boxed());  // one kernel; torch has a formula of seven as well
}
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {  // the CPU's, gloo, in place of NCCL's
  for (auto name : {"allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "broadcast_"})
    library.impl(name, boxed());
}
TORCH_LIBRARY(emulated, library) { library.def("resize_storage(int address, int n_bytes) -> ()", resize_storage); }
