import sys; sys.path.insert(0,'benchmarks')
import torch, host_patterns as hp
from torch.utils.cpp_extension import load
load(name="kvdock_baseline", sources=["benchmarks/paged_caching_op.cu"], is_python_module=False, extra_cuda_cflags=["-O3"])
B=torch.ops.kvdock_baseline
sk=torch.zeros((),dtype=torch.int64,device='cuda')
base=lambda a,b,c,d,e: B.paged_caching(a,b,c,d,e,sk)
op=B.paged_caching
base=op
S=torch.cuda.synchronize
for p in hp.write_patterns('cuda:0',base)+hp.gather_patterns('cuda:0',B.gather_paged)+hp.copy_patterns('cuda:0'):
    r=hp.measure(p,S)
    b=next(iter(r.values()))
    print(f"{p.name:45s}", "  ".join(f"{n}: {m:.2f} ({lo:.2f}) {m/b[1]:.2f}/{lo/b[0]:.2f}" for n,(lo,m,hi) in r.items()))
print('first', hp.first_steps('cuda:0',S))
