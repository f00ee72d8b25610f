export interface Target { name: string; priority: number; setsAt: number }

/** The next target: highest priority first, then the one that sets earliest. */
export function nextTarget(queue: Target[]): Target | undefined {
  return [...queue].sort((a, b) => b.priority - a.priority || a.setsAt - b.setsAt)[0];
}
