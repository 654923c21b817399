; ModuleID = "kernel"
target triple = "x86_64-unknown-linux-gnu"
target datalayout = ""

define internal void @"kernel_body"(ptr noalias %".1", ptr noalias %".2", ptr noalias %".3", i64 %".4", i64 %".5") nounwind
{
entry:
  %"acc1.0" = alloca <8 x float>
  %"acc1.8" = alloca <8 x float>
  br label %"start"
start:
  br label %"panel.loop"
panel.loop:
  %"panel" = phi i64 [0, %"start"], [%".48", %"row_t.end"]
  br label %"row_t.loop"
panel.end:
  ret void
row_t.loop:
  %"row_t" = phi i64 [0, %"panel.loop"], [%".45", %"k0_0_u.end"]
  store <8 x float> splat (float 0x0), ptr %"acc1.0"
  store <8 x float> splat (float 0x0), ptr %"acc1.8"
  br label %"k0_0_u.loop"
row_t.end:
  %".48" = add nsw nuw i64 %"panel", 1
  %".49" = icmp slt i64 %".48", 2
  br i1 %".49", label %"panel.loop", label %"panel.end"
k0_0_u.loop:
  %"k0_0_u" = phi i64 [0, %"row_t.loop"], [%".33", %"k0_0_u.loop"]
  %".12" = mul nsw i64 %"row_t", 16
  %".13" = add nsw i64 %".12", %"k0_0_u"
  %".14" = getelementptr float, ptr %".1", i64 %".13"
  %".15" = load float, ptr %".14", align 4
  %".16" = mul nsw i64 %"panel", 64
  %".17" = mul nsw i64 %"k0_0_u", 8
  %".18" = add nsw i64 %".16", %".17"
  %".19" = getelementptr float, ptr %".2", i64 %".18"
  %".20" = load <8 x float>, ptr %".19", align 4
  %".21" = load <8 x float>, ptr %"acc1.0"
  %".22" = insertelement <8 x float> splat (float undef), float %".15", i64 0
  %".23" = shufflevector <8 x float> %".22", <8 x float> splat (float undef), <8 x i32> splat (i32 0)
  %".24" = call <8 x float> @"llvm.fma.v8f32"(<8 x float> %".23", <8 x float> %".20", <8 x float> %".21")
  store <8 x float> %".24", ptr %"acc1.0"
  %".26" = getelementptr float, ptr %".14", i64 8
  %".27" = load float, ptr %".26", align 4
  %".28" = load <8 x float>, ptr %"acc1.8"
  %".29" = insertelement <8 x float> splat (float undef), float %".27", i64 0
  %".30" = shufflevector <8 x float> %".29", <8 x float> splat (float undef), <8 x i32> splat (i32 0)
  %".31" = call <8 x float> @"llvm.fma.v8f32"(<8 x float> %".30", <8 x float> %".20", <8 x float> %".28")
  store <8 x float> %".31", ptr %"acc1.8"
  %".33" = add nsw nuw i64 %"k0_0_u", 1
  %".34" = icmp slt i64 %".33", 8
  br i1 %".34", label %"k0_0_u.loop", label %"k0_0_u.end"
k0_0_u.end:
  %".36" = load <8 x float>, ptr %"acc1.0"
  %".37" = mul nsw i64 %"row_t", 32
  %".38" = mul nsw i64 %"panel", 8
  %".39" = add nsw i64 %".37", %".38"
  %".40" = getelementptr float, ptr %".3", i64 %".39"
  store <8 x float> %".36", ptr %".40", align 4
  %".42" = load <8 x float>, ptr %"acc1.8"
  %".43" = getelementptr float, ptr %".40", i64 16
  store <8 x float> %".42", ptr %".43", align 4
  %".45" = add nsw nuw i64 %"row_t", 1
  %".46" = icmp slt i64 %".45", 2
  br i1 %".46", label %"row_t.loop", label %"row_t.end"
}

declare <8 x float> @"llvm.fma.v8f32"(<8 x float> %".1", <8 x float> %".2", <8 x float> %".3")

define void @"kernel"(ptr %".1", i64 %".2", i64 %".3") nounwind
{
entry:
  %".5" = getelementptr inbounds ptr, ptr %".1", i64 0
  %".6" = load ptr, ptr %".5"
  %".7" = getelementptr inbounds ptr, ptr %".1", i64 1
  %".8" = load ptr, ptr %".7"
  %".9" = getelementptr inbounds ptr, ptr %".1", i64 2
  %".10" = load ptr, ptr %".9"
  call void @"kernel_body"(ptr %".6", ptr %".8", ptr %".10", i64 %".2", i64 %".3")
  ret void
}
