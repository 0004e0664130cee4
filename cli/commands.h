/* The commands of the tool. Each lives in its own file, over mok.h and the helpers of this folder, and returns the exit status: 0, 1 for
 * a failed check, 2 for wrong use. argv starts behind the command's name. */
#ifndef MOK_CLI_COMMANDS_H
#define MOK_CLI_COMMANDS_H

#define COMMAND_LIST(X)                                                                                             \
    X(info, "what this library can run here: backends, devices, limits")                                            \
    X(plan, "what a layer will cost, before anything is allocated")                                                 \
    X(check, "numerics against float64, and the same bits for any ranks, ring, minibatch and save policy")          \
    X(bench, "times of a layer's passes, and the GEMM beside OpenBLAS")                                             \
    X(simulate, "a layer on machines that are not here, from the real schedule and a machine profile")              \
    X(tune, "communication SMs, minibatch and ring for a machine, by simulating them")                              \
    X(calibrate, "fits a machine profile to measured passes")                                                       \
    X(doctor, "what ranks need on this machine, whether it is there, and what to change")                           \
    X(trace, "who did what when in a pass: summary, picture, or a file for ui.perfetto.dev")                        \
    X(soak, "random steps, every one checked, with faults in between")                                              \
    X(train, "a small language model over several ranks, with the same bits for any number of them")

#define COMMAND_DECLARE(name, summary) int command_##name(int argc, char **argv);
COMMAND_LIST(COMMAND_DECLARE)
#undef COMMAND_DECLARE

#endif
