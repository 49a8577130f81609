/* libhcomm, which torch_npu opens by name where CANN is 9.1: groups of sends and receives. */
int host_cann_group_start(void); /* in libhccl */
int host_cann_group_end(void);

int HcclGroupStart(void) { return host_cann_group_start(); }
int HcclGroupEnd(void) { return host_cann_group_end(); }
