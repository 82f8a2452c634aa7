// rows.cu on an emulated device, for ctypes.

#include <rows.cu>

extern "C" {

size_t size_of_step() { return sizeof(Step); }

// 0 if it came to its end. The kernel before writes `size` bytes of `product` to where the step reads them.
int run(const Step* step, int num_programs, unsigned seed, const void* product, size_t size) {
    const auto before = [=] { memcpy(const_cast<u16*>(step->qkv), product, size); };
    return !device::run([=] { compute(*step); }, before, num_programs, PROGRAM, 1, seed);
}
}
