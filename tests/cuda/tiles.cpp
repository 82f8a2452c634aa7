// tiles.cu on an emulated device, for ctypes.

#include <tiles.cu>

extern "C" {

size_t size_of_step() { return sizeof(Step); }

// 0 if it came to its end. The kernel before writes `sizes` bytes `from` where the step reads them: queries, keys, values.
int run(const Step* step, int num_programs, unsigned seed, const void* const* from, const size_t* sizes) {
    const auto before = [=] {
        const TensorMap* maps[] = {&step->queries, &step->keys, &step->values};
        for (int at = 0; at < 3; at++) memcpy(const_cast<u16*>(maps[at]->base), from[at], sizes[at]);
    };
    return !device::run([=] { compute(*step); }, before, num_programs, THREADS, 1, seed);
}
}
