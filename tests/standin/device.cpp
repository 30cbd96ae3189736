// A stand-in for an accelerator: torch's PrivateUse1 device over main memory, whose kernels are the CPU's.
//
// Its memory is allocated and counted by itself, and every kernel is counted. An operator without a kernel of its own
// here sees the same bytes as CPU tensors. Like a real device it refuses operands that lie elsewhere, numbers without a
// dimension and indices excepted. Streams are in order already: waiting for one is nothing.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
thread_local c10::DeviceIndex current = 0;
thread_local std::array<int64_t, DEVICES> streams{};

struct Counts {
  std::atomic<int64_t> kernels{0}, held{0}, peak{0}, total{int64_t(4) << 30};
};
std::array<Counts, DEVICES> counts;

c10::Device here() { return {KIND, current}; }
c10::Device settled(c10::Device device) { return device.has_index() ? device : here(); }

// ---- memory

struct Block {
  void* bytes;
  int64_t size;
  c10::DeviceIndex device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  counts[block->device].held -= block->size;
  std::free(block->bytes);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto& count = counts[current];
    TORCH_CHECK_WITH(OutOfMemoryError, count.held + int64_t(size) <= count.total, "stand-in out of memory: tried to allocate ", size, " bytes");
    void* bytes = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    count.held += size;
    count.peak = std::max(count.peak.load(), count.held.load());
    auto* block = new Block{bytes, int64_t(size), current};
    return {bytes, block, &release, here()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

// ---- devices and streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = here();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < DEVICES, "the stand-in has no device ", int(device.index()));
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, settled(device), streams[settled(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, settled(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> newest{0};
    return c10::Stream(c10::Stream::UNSAFE, settled(device), ++newest);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Draws final : at::CPUGeneratorImpl {
  explicit Draws(c10::DeviceIndex index) {
    device_ = c10::Device(KIND, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& draws_of(c10::DeviceIndex index) {
  static std::array<at::Generator, DEVICES> all{at::make_generator<Draws>(0), at::make_generator<Draws>(1)};
  return all[index < 0 ? current : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({KIND, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({KIND, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return draws_of(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Draws>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto larger = memory.allocate(size);
    std::memcpy(larger.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(size);
  }
};

// ---- tensors

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(settled(device.value_or(here())));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(settled(device.value_or(here())));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

// The same bytes, as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != KIND) return tensor;
  auto storage = tensor.storage();
  c10::DataPtr seen(storage.mutable_data(), new c10::Storage(storage),
                    [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(seen), c10::GetAllocator(c10::kCPU), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

at::Tensor on_device(const at::Tensor& host, c10::Device device) {
  if (!host.defined()) return host;
  c10::DeviceGuard guard(device);
  at::Tensor result = at::detail::empty_strided_generic(host.sizes(), host.strides(), &memory,
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.scalar_type());
  on_host(result).copy_(host);
  return result;
}

// What a CPU kernel returned of the bytes of `whole`.
at::Tensor view_of(const at::Tensor& whole, const at::Tensor& host) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(whole.storage()),
                                                         whole.key_set(), host.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return result;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
  auto bytes = at::detail::computeStorageNbytesContiguous(wanted, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(wanted);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* held = self.unsafeGetTensorImpl();
  held->set_storage_keep_dtype(std::move(source));
  if (strides.size() == sizes.size()) {
    held->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  } else {
    held->set_storage_offset(offset.expect_int());
    held->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  counts[(to.device().type() == KIND ? to : from).device().index()].kernels++;
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(at::Tensor&, c10::Stream) {}

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                        bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// ---- every other operator

struct Operand {
  at::Tensor device, host;
  bool written;
};

bool may_lie_elsewhere(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  auto& name = op.schema().name();
  return tensor.dim() == 0 || name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  std::vector<Operand> operands;
  std::optional<c10::Device> target;
  bool stranger = false;
  std::optional<at::Generator> drawn_with, borrowed;

  auto lent = [&](const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != KIND) {
      stranger |= !may_lie_elsewhere(op, tensor);
      return tensor;
    }
    if (!target) target = tensor.device();
    TORCH_CHECK(*target == tensor.device(), schema.name(), ": operands on two devices, ", *target, " and ", tensor.device());
    TORCH_CHECK(tensor.scalar_type() != c10::kDouble, schema.name(), ": the stand-in has no double precision");
    operands.push_back({tensor, on_host(tensor), written});
    return operands.back().host;
  };

  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = lent(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> lists;
      for (at::Tensor tensor : value.toTensorList()) lists.push_back(lent(tensor, written));
      value = lists;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> lists;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        lists.push_back(tensor ? std::optional(lent(*tensor, written)) : std::nullopt);
      value = lists;
    } else if (value.isDevice()) {
      target = settled(value.toDevice());
      value = c10::Device(c10::kCPU);
    } else if (argument.type()->str().find("Generator") != std::string::npos) {
      drawn_with = value.isNone() ? draws_of(-1) : value.toGenerator();
      borrowed = at::make_generator<at::CPUGeneratorImpl>();
      borrowed->set_state(drawn_with->get_state());
      value = *borrowed;
    }
  }
  TORCH_CHECK(!stranger, schema.name(), ": expected all tensors to be on ", target.value_or(here()),
              ", and one is on the CPU");
  const auto device = target.value_or(here());
  counts[device.index()].kernels++;
  if (schema.name() == "aten::native_dropout") {  // draws without being given a generator
    auto host = at::detail::getDefaultCPUGenerator();
    auto own = draws_of(-1);
    const auto kept = host.get_state();
    host.set_state(own.get_state());
    op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
    own.set_state(host.get_state());
    host.set_state(kept);
  } else {
    op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
  }
  if (borrowed) drawn_with->set_state(borrowed->get_state());

  for (auto& operand : operands) {
    if (!operand.written) continue;
    auto& host = operand.host;
    if (host.storage().data() == operand.device.storage().data() && host.sizes() == operand.device.sizes()) continue;
    // An `out` that the kernel has made larger.
    operand.device.resize_(host.sizes());
    on_host(operand.device).copy_(host);
  }
  auto given_back = [&](const at::Tensor& host) {
    if (!host.defined()) return host;
    for (auto& operand : operands) {
      if (operand.host.is_same(host)) return operand.device;
      if (operand.host.storage().data() && operand.host.storage().data() == host.storage().data())
        return view_of(operand.device, host);
    }
    return on_device(host, device);
  };
  const auto returned = stack->size() - schema.returns().size();
  for (size_t i = returned; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = given_back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> lists;
      for (at::Tensor tensor : value.toTensorList()) lists.push_back(given_back(tensor));
      value = lists;
    }
  }
}

// Collectives of the device's tensors are those of the same bytes in main memory, by the group's other library.
std::atomic<int64_t> collectives_run{0};
void run_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  collectives_run++;
  run(op, keys, stack);
}

int64_t collectives() { return collectives_run; }
int64_t kernels(int64_t device) { return counts[device].kernels; }
int64_t held(int64_t device) { return counts[device].held; }
int64_t peak(int64_t device) { return counts[device].peak; }
int64_t total(int64_t device) { return counts[device].total; }
at::Tensor random_state(int64_t device) { return draws_of(device).get_state(); }
void set_random_state(int64_t device, const at::Tensor& state) { at::Generator(draws_of(device)).set_state(state); }
void seed(int64_t device, int64_t number) { at::Generator(draws_of(device)).set_current_seed(number); }
void limit(int64_t device, int64_t bytes) { counts[device].total = bytes; }

Hooks hooks;
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &plain_attention)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (auto name : {"allreduce_", "broadcast_", "_allgather_base_", "_reduce_scatter_base_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_collective>());
}

TORCH_LIBRARY(standin, m) {
  m.def("collectives() -> int", &collectives);
  m.def("on_host(Tensor tensor) -> Tensor");
  m.def("kernels(int device) -> int", &kernels);
  m.def("held(int device) -> int", &held);
  m.def("peak(int device) -> int", &peak);
  m.def("total(int device) -> int", &total);
  m.def("random_state(int device) -> Tensor", &random_state);
  m.def("set_random_state(int device, Tensor state) -> ()", &set_random_state);
  m.def("seed(int device, int number) -> ()", &seed);
  m.def("limit(int device, int bytes) -> ()", &limit);
}

TORCH_LIBRARY_IMPL(standin, PrivateUse1, m) {
  m.impl("on_host", &on_host);
}
