// All words of the page, in English and Chinese; and numbers and times as people read them.

const WORDS = {
  en: {
    enter: "Enter", forget: "Forget key", keyTitle: "API key needed",
    keyHint: "`opentinker up` wrote it to secrets/api-key in its home. It stays in this tab only.", keyLabel: "API key", keyWrong: "This key was refused.",
    jobs: "Jobs", phase: "Phase", all: "all", search: "Find", name: "Name", namespace: "Namespace", replicas: "Replicas", steps: "Steps", speed: "Steps/s",
    mean: "Mean return", model: "Model", age: "Submitted", loading: "Loading…",
    empty: "No jobs yet. Submit one with: opentinker submit -f examples/cartpole-v1.json", noMatch: "No job matches.", more: "Show more",
    asOf: "as of {time}", lost: "Lost contact with the gateway since {time}; trying again. Jobs go on without this page.", failed: "The gateway answered: {text}",
    retry: "Try again", close: "Close", cancel: "Cancel job", cancelTitle: "Cancel {name}?",
    cancelText: "A running job saves a checkpoint and stops. A cancelled job does not start again.", keep: "Keep it running", cancelled: "Cancellation accepted.",
    why: "Why it waits", ended: "How it ended", position: "Position {n} in its pool", attempt: "Attempt", nodes: "Nodes", pool: "Pool", episodes: "Episodes", eta: "Time left",
    checkpoint: "Checkpoint", atStep: "at step {n}", stop: "Stopped by", uid: "Uid", settings: "Settings", algorithm: "Algorithm", environment: "Environment",
    seed: "Seed", metric: "Metric", noPoints: "No samples yet.", logs: "Output", noLogs: "No output yet.", dropped: "({n} lines left out)", command: "The same in a terminal",
    step: "step", value: "value", nan: "Samples that are not finite: {n}", gone: "This job is not known here (any more).", none: "none", of: "of {n}",
    phases: { Pending: "Pending", Starting: "Starting", Running: "Running", Stopping: "Stopping", Completed: "Completed", Failed: "Failed", Cancelled: "Cancelled" },
  },
  zh: {
    enter: "进入", forget: "清除密钥", keyTitle: "需要 API 密钥",
    keyHint: "`opentinker up` 已将密钥写入其主目录的 secrets/api-key。密钥只保存在此标签页中。", keyLabel: "API 密钥", keyWrong: "密钥被拒绝。",
    jobs: "任务", phase: "阶段", all: "全部", search: "查找", name: "名称", namespace: "命名空间", replicas: "副本", steps: "步数", speed: "步/秒",
    mean: "平均回报", model: "模型", age: "提交时间", loading: "加载中…",
    empty: "还没有任务。提交一个:opentinker submit -f examples/cartpole-v1.json", noMatch: "没有匹配的任务。", more: "显示更多",
    asOf: "数据时间 {time}", lost: "自 {time} 起与网关失去联系,正在重试。任务不受此页面影响,会继续运行。", failed: "网关回答:{text}",
    retry: "重试", close: "关闭", cancel: "取消任务", cancelTitle: "取消 {name}?",
    cancelText: "运行中的任务会先保存检查点再停止。已取消的任务不会重新开始。", keep: "继续运行", cancelled: "已接受取消请求。",
    why: "等待原因", ended: "结束情况", position: "在资源池中排第 {n} 位", attempt: "尝试", nodes: "节点", pool: "资源池", episodes: "回合数", eta: "剩余时间",
    checkpoint: "检查点", atStep: "第 {n} 步", stop: "停止规则", uid: "唯一标识", settings: "设置", algorithm: "算法", environment: "环境",
    seed: "随机种子", metric: "指标", noPoints: "还没有采样。", logs: "输出", noLogs: "还没有输出。", dropped: "(省略 {n} 行)", command: "终端中的等价命令",
    step: "步", value: "值", nan: "非有限数采样:{n}", gone: "此处(不再)知道这个任务。", none: "无", of: "共 {n}",
    phases: { Pending: "等待", Starting: "启动中", Running: "运行中", Stopping: "停止中", Completed: "完成", Failed: "失败", Cancelled: "已取消" },
  },
};

export const language = (navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en";
document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
const words = WORDS[language];

/** The word for `name`, with {parts} filled in. */
export function say(name, parts = {}) {
  return words[name].replace(/\{(\w+)\}/g, (_, part) => String(parts[part]));
}

export const phaseWord = (phase) => words.phases[phase] || phase;

const locale = navigator.language || "en"; // numbers and times as this browser writes them
const counts = new Intl.NumberFormat(locale);
const short = new Intl.NumberFormat(locale, { maximumSignificantDigits: 5 });
const times = new Intl.DateTimeFormat(locale, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dates = new Intl.DateTimeFormat(locale, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

export const count = (value) => (value === null || value === undefined ? "" : counts.format(value));
export const amount = (value) => (typeof value === "number" ? short.format(value) : value === null || value === undefined ? "" : String(value));
export const clock = (date) => times.format(date);
export const moment = (iso) => (iso ? dates.format(new Date(iso)) : "");

/** 4000 → 1 h 6 min */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const units = [[86400, language === "zh" ? "天" : "d"], [3600, language === "zh" ? "小时" : "h"], [60, language === "zh" ? "分" : "min"], [1, language === "zh" ? "秒" : "s"]];
  const shown = [];
  let left = Math.round(seconds);
  for (const [size, unit] of units) {
    if (left >= size) shown.push(`${Math.floor(left / size)} ${unit}`);
    left %= size;
  }
  return shown.slice(0, 2).join(" ") || `0 ${units[3][1]}`;
}
