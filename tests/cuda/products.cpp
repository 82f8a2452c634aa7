// products.cu on an emulated device, for ctypes.

#include <products.cu>

extern "C" {

size_t size_of_product() { return sizeof(Product); }

// 0 if it came to its end.
int run(const Product* product, int num_programs, unsigned seed) {
    return !device::run([=] { compute(*product); }, [] {}, num_programs, THREADS, RANKS, seed);
}
}
