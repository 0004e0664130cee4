/* The emulator, as a test sees it: devices that run kernels of src/cuda compiled by g++ -DMOK_EMU.
 *
 *   emu::Machine machine(seed);
 *   emu::Device &gpu = machine.add_device(2);                      // two clusters resident at once
 *   emu::Buffer<float> x(machine, "x", 1024);                      // global memory, with bounds and written bytes known
 *   gpu.launch({.blocks = 8, .cluster = 2, .threads = 384, .shared_bytes = sizeof(Shared)}, [&] { kernel(params); });
 *   emu::Result r = machine.run();                                 // r.ok, or r.message says what went wrong where
 *
 * CUDA threads are fibers of one host thread. Whom to run next, and when an asynchronous copy or MMA takes effect, is drawn
 * from the seed: the same seed repeats everything, another one is another order. Launches of one device run one after the
 * other, those of different devices at the same time (ranks of one layer). What is checked, and what is not, is in README.md.
 * The emulator is a test vehicle, never a backend. */
#ifndef MK_EMU_EMU_H
#define MK_EMU_EMU_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/arch/tensor_map.h"

namespace emu {

struct Launch {
    uint32_t blocks = 1, cluster = 1, threads = 1;
    uint32_t shared_bytes = 0;
    const char *name = "kernel";
};

struct Result {
    bool ok = true;
    std::string message;      /* of the first thing found wrong */
    uint64_t seed = 0;
    uint64_t switches = 0;    /* fibers resumed */
    uint64_t async_ops = 0;   /* copies and MMAs that took effect */
};

struct State;        /* everything the scheduler knows: machine.h */
struct DeviceState;

class Device {
public:
    void launch(const Launch &shape, std::function<void()> kernel);
    /* Cluster Launch Control refuses one request in so many although clusters wait, as if somebody more important wanted the SM. 0: never. */
    void refuse_launches(uint32_t one_in);
    /* When a cluster leaves, the next one of the grid comes in one of so many turns of the scheduler, as if somebody else had the SM meanwhile. 0: at once. */
    void start_late(uint32_t one_in);
private:
    friend class Machine;
    DeviceState *state_ = nullptr;
};

class Machine {
public:
    explicit Machine(uint64_t seed);
    ~Machine();
    Machine(const Machine &) = delete;
    Machine &operator=(const Machine &) = delete;

    /* The rest of a grid's clusters start only when one leaves. */
    Device &add_device(uint32_t resident_clusters);
    /* Runs every launch so far to its end, or to the first error. */
    Result run();
    /* When nothing can go on but some threads only poll memory and the clock, let time pass (waits run into their limits) instead
     * of calling it a deadlock. */
    void let_time_pass(bool on);

    void *allocate(size_t bytes, const char *name);
    void release(void *base);
    void set_written(const void *p, size_t bytes, bool written);
    bool is_written(const void *p, size_t bytes) const;

private:
    std::unique_ptr<State> state_;
    std::vector<std::unique_ptr<Device>> devices_;
};

/* Global memory of a machine. Begins unwritten (reading it is an error) and filled with a poison pattern; `host` is the
 * test's own access and counts as writing all of it. */
template <class T> class Buffer {
public:
    Buffer(Machine &machine, const char *name, size_t count)
        : machine_(machine), count_(count), data_(static_cast<T *>(machine.allocate(count * sizeof(T), name))) {}
    ~Buffer() { machine_.release(data_); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    T *host() { machine_.set_written(data_, count_ * sizeof(T), true); return data_; }
    T *device() const { return data_; }
    const T &operator[](size_t i) const { return data_[i]; }
    bool written(size_t i, size_t n = 1) const { return machine_.is_written(data_ + i, n * sizeof(T)); }
    size_t count() const { return count_; }
private:
    Machine &machine_;
    size_t count_;
    T *data_;
};

/* Of the signature of cuTensorMapEncodeTiled: fills the emulator's own map and refuses what the driver refuses. */
int tensor_map_encode_tiled(void *map, int type, uint32_t rank, void *address, const uint64_t *dim, const uint64_t *stride_bytes,
                            const uint32_t *box, const uint32_t *element_stride, int interleave, int swizzle, int l2_promotion,
                            int oob_fill);

/* Pure functions of the hardware's address arithmetic, for tests against known vectors. */
uint32_t swizzle_address(uint32_t address, int tensor_swizzle);
uint32_t matrix_element_address(uint64_t descriptor, bool mn_major, uint32_t mn, uint32_t k);
uint16_t float_to_bf16(float x);
uint8_t float_to_e4m3(float x);
inline float bf16_to_float(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

} /* namespace emu */
#endif
