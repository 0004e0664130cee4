// The same cases from C++: mok.h is C++ too, with the same layout and C linkage.
#include "abi_cases.h"

#include <type_traits>

TEST(structs_are_plain_data)
{
#define CHECK_PLAIN(type, size)                      \
    CHECK(std::is_standard_layout<type>::value);     \
    CHECK(std::is_trivially_copyable<type>::value);
    ABI_SIZE_LIST(CHECK_PLAIN)
#undef CHECK_PLAIN
}

TEST(a_mok_config_of_cpp_is_one_of_c)
{
    auto c = MOK_INIT(mok_config); // a value of the right type, not a pointer
    static_assert(std::is_same<decltype(c), mok_config>::value, "MOK_INIT gives the struct itself");
    c.hidden = c.intermediate = 128;
    c.num_experts = 4;
    c.topk = 2;
    c.max_tokens = 10;
    auto plan = MOK_INIT(mok_plan);
    CHECK_EQ(mok_plan_query(&c, 2, 1, 0, 0, 0, &plan, nullptr, nullptr), MOK_OK);
    CHECK_EQ(plan.experts_first, 2);
}

int main(int argc, char **argv)
{
    return test_main(argc, argv);
}
