// A CUDA device on the memory and the kernels of the CPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <cstring>
#include <map>
#include <mutex>

namespace {
using c10::IValue;

c10::Device device() { return {c10::DeviceType::CUDA, 0}; }
c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }

// Memory: a tensor of the device and one of the CPU may share a storage's bytes.
void release(void* owner) { delete static_cast<c10::Storage*>(owner); }

c10::Storage on(c10::Device where, const c10::Storage& storage, c10::Allocator* allocator) {
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), &release, where);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
}

struct Memory : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto data = c10::GetCPUAllocator()->allocate(bytes);
    void* start = data.get();
    auto deleter = data.get_deleter();
    return {start, data.release_context(), deleter, device()};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

// A generator of the device draws the CPU's numbers, from a state of its own.
struct Generator : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed) : at::CPUGeneratorImpl(seed) { device_ = device(); }
  void pretend(c10::Device where) { device_ = where; }
};
const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<Generator>(c10::default_rng_seed_val);
  return generator;
}

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    static bool is_first = true;  // Python's default generator
    if (is_first) { is_first = false; return default_generator(); }
    return at::make_generator<Generator>(c10::default_rng_seed_val);
  }
};

// One call of an operator on the CPU: tensors of the device are looked at as tensors of the CPU.
struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> known;
  std::vector<Generator*> generators;
  std::unique_lock<std::mutex> lock;

  static at::Tensor like(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
    auto* made_impl = made.unsafeGetTensorImpl();
    made_impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made_impl->set_wrapped_number(true);
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
  }
  at::Tensor down(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& [ours, cpus] : known)
      if (ours.is_same(tensor)) return cpus;
    auto made = like(tensor, on(c10::kCPU, tensor.storage(), c10::GetCPUAllocator()), c10::DispatchKey::CPU);
    known.emplace_back(tensor, made);
    return made;
  }
  at::Tensor up(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [ours, cpus] : known)
      if (cpus.is_same(tensor)) return ours;
    for (auto& [ours, cpus] : known)
      if (tensor.storage().nbytes() != 0 && cpus.storage().data() == tensor.storage().data())
        return like(tensor, ours.storage(), c10::DispatchKey::CUDA);
    return like(tensor, on(device(), tensor.storage(), &memory), c10::DispatchKey::CUDA);
  }
  // What a kernel has resized or set.
  void write_back() {
    for (auto& [ours, cpus] : known) {
      auto* impl = ours.unsafeGetTensorImpl();
      if (cpus.storage().data() != ours.storage().data()) {
        impl->set_storage_keep_dtype(on(device(), cpus.storage(), &memory));
      }
      if (cpus.sizes() != ours.sizes() || cpus.strides() != ours.strides() ||
          cpus.storage_offset() != ours.storage_offset()) {
        impl->set_sizes_and_strides(cpus.sizes(), cpus.strides(), cpus.storage_offset());
      }
    }
    for (auto* generator : generators) generator->pretend(device());
  }
  IValue map(const IValue& value, bool is_up) {
    if (value.isTensor()) return is_up ? up(value.toTensor()) : down(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const auto& item : value.toTensorVector()) made.push_back(is_up ? up(item) : down(item));
      return made;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> made;
      for (const IValue& item : value.toList())
        made.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(is_up ? up(item.toTensor()) : down(item.toTensor())));
      return made;
    }
    if (value.isStorage() && !is_up && value.toStorage().device().is_cuda())
      return on(c10::kCPU, value.toStorage(), c10::GetCPUAllocator());
    if (value.isDevice() && !is_up && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    return value;
  }
  IValue draw(const IValue& value) {
    static std::mutex drawing;
    at::Generator generator = value.isNone() ? default_generator() : value.toGenerator();
    if (generator.device().is_cpu()) return generator;
    if (!lock.owns_lock()) lock = std::unique_lock<std::mutex>(drawing);
    auto* own = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
    own->pretend(c10::kCPU);
    generators.push_back(own);
    return generator;
  }
};

// Kernels of the device that lay out their result as the argument of this number, if it is dense; the CPU's lay it out in order.
const std::map<std::string, size_t> LAYOUT_OF = {
    {"aten::native_batch_norm", 0}, {"aten::_native_batch_norm_legit", 0}, {"aten::_batch_norm_with_update", 0},
    {"aten::native_batch_norm_backward", 1}, {"aten::batch_norm_backward", 1}};

IValue laid_out(const IValue& result, const IValue& model) {
  const auto& like = model.toTensor();
  if (!result.toTensor().defined() || !like.is_non_overlapping_and_dense()) return result;
  return at::empty_strided(like.sizes(), like.strides(), result.toTensor().options()).copy_(result.toTensor());
}

void on_the_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::vector<IValue> values(stack->end() - arguments.size(), stack->end());
  torch::jit::drop(*stack, arguments.size());
  Call call;
  for (size_t index = 0; index < values.size(); ++index) {
    const auto type = arguments[index].type();
    const bool draws = type->str().find("Generator") != std::string::npos;
    stack->push_back(draws ? call.draw(values[index]) : call.map(values[index], false));
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } catch (...) {
    call.write_back();
    throw;
  }
  call.write_back();
  const size_t count = op.schema().returns().size();
  const auto kept = LAYOUT_OF.find(op.operator_name().name);
  if (kept != LAYOUT_OF.end()) {
    auto& result = (*stack)[stack->size() - count];
    result = laid_out(result, values[kept->second]);
  }
  for (size_t index = stack->size() - count; index < stack->size(); ++index) (*stack)[index] = call.map((*stack)[index], true);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool) {
  Call call;
  auto to = call.down(self);
  to.copy_(call.down(source));
  call.write_back();
  return self;
}
void record_stream(at::Tensor&, c10::Stream) {}
int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

struct Register {
  Register() {
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<Hooks>(args);
    });
    c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, new Guard());
    c10::SetAllocator(c10::DeviceType::CUDA, &memory);
  }
} registered;
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &copy);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &plain_attention);
}
