; ModuleID = "kernel"
target triple = "x86_64-unknown-linux-gnu"
target datalayout = ""

define internal void @"kernel_body"(ptr noalias %".1", ptr noalias %".2", ptr noalias %".3", i64 %".4", i64 %".5") nounwind
{
entry:
  br label %"start"
start:
  br label %"i0.loop"
i0.loop:
  %"i0" = phi i64 [0, %"start"], [%".53", %"i0.loop"]
  %".8" = mul nsw i64 %"i0", 40
  %".9" = getelementptr float, ptr %".1", i64 %".8"
  %".10" = load <8 x float>, ptr %".9", align 4
  %".11" = load <8 x float>, ptr %".2", align 4
  %".12" = fadd nsz contract afn <8 x float> %".10", %".11"
  %".13" = fcmp ogt <8 x float> splat (float 0x0), %".12"
  %".14" = select <8 x i1> %".13", <8 x float> splat (float 0x0), <8 x float> %".12"
  %".15" = getelementptr float, ptr %".3", i64 %".8"
  store <8 x float> %".14", ptr %".15", align 4
  %".17" = getelementptr float, ptr %".9", i64 8
  %".18" = load <8 x float>, ptr %".17", align 4
  %".19" = getelementptr float, ptr %".2", i64 8
  %".20" = load <8 x float>, ptr %".19", align 4
  %".21" = fadd nsz contract afn <8 x float> %".18", %".20"
  %".22" = fcmp ogt <8 x float> splat (float 0x0), %".21"
  %".23" = select <8 x i1> %".22", <8 x float> splat (float 0x0), <8 x float> %".21"
  %".24" = getelementptr float, ptr %".15", i64 8
  store <8 x float> %".23", ptr %".24", align 4
  %".26" = getelementptr float, ptr %".9", i64 16
  %".27" = load <8 x float>, ptr %".26", align 4
  %".28" = getelementptr float, ptr %".2", i64 16
  %".29" = load <8 x float>, ptr %".28", align 4
  %".30" = fadd nsz contract afn <8 x float> %".27", %".29"
  %".31" = fcmp ogt <8 x float> splat (float 0x0), %".30"
  %".32" = select <8 x i1> %".31", <8 x float> splat (float 0x0), <8 x float> %".30"
  %".33" = getelementptr float, ptr %".15", i64 16
  store <8 x float> %".32", ptr %".33", align 4
  %".35" = getelementptr float, ptr %".9", i64 24
  %".36" = load <8 x float>, ptr %".35", align 4
  %".37" = getelementptr float, ptr %".2", i64 24
  %".38" = load <8 x float>, ptr %".37", align 4
  %".39" = fadd nsz contract afn <8 x float> %".36", %".38"
  %".40" = fcmp ogt <8 x float> splat (float 0x0), %".39"
  %".41" = select <8 x i1> %".40", <8 x float> splat (float 0x0), <8 x float> %".39"
  %".42" = getelementptr float, ptr %".15", i64 24
  store <8 x float> %".41", ptr %".42", align 4
  %".44" = getelementptr float, ptr %".9", i64 32
  %".45" = load <8 x float>, ptr %".44", align 4
  %".46" = getelementptr float, ptr %".2", i64 32
  %".47" = load <8 x float>, ptr %".46", align 4
  %".48" = fadd nsz contract afn <8 x float> %".45", %".47"
  %".49" = fcmp ogt <8 x float> splat (float 0x0), %".48"
  %".50" = select <8 x i1> %".49", <8 x float> splat (float 0x0), <8 x float> %".48"
  %".51" = getelementptr float, ptr %".15", i64 32
  store <8 x float> %".50", ptr %".51", align 4
  %".53" = add nsw nuw i64 %"i0", 1
  %".54" = icmp slt i64 %".53", 4
  br i1 %".54", label %"i0.loop", label %"i0.end"
i0.end:
  ret void
}

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
