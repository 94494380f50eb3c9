-- Calls of a mixture take turns; the one whose turn it is learns its split, and what it keeps counts.
-- KEYS[1] <prefix>stream of the mixture, a key that is never made
-- ARGV    verb, caller, operation, turn_ms, queue_ms, count, waits,
--         and for each task: name, part, share, waited_ms, short 0|1
--         parts: whole numbers, the task's weight is part / sum of parts; sum <= 2^32
--         turn: ask for the turn, and queue for queue_ms; 0 leaves the queue
--         hold: it goes on, for turn_ms more; it waits for the task `waits`, or '' as before
--         keep: what was taken counts, and the turn ends; share is what was taken of each task
--         give: nothing was taken, or what a keep counted does not count, and the turn ends
--         look: nothing changes
-- Returns turn: {'turn' | 'wait', task that the call whose turn it is waits for, how many of its
--         groups that call needs, share ...}
--         hold, keep: {'ok'} | {'lost'}; give: {'ok'}
--         look: {task that is waited for, for how many ms, then for each task: taken, short, waited_ms}
--
-- `task` is a hash: tickets, waits, need, since, and of each task credit, taken, short, waited_ms.
-- credit:<task> = part * total - sum of parts * taken: how far the task is behind; all add up to 0.
-- turn holds "<caller> <operation>", ended:<caller> "<last operation> kept|given"; both expire.
--@include task waiters

local ENDED_MS, UNUSED_MS = 3600000, 2592000000
local verb, caller, operation = ARGV[1], ARGV[2], tonumber(ARGV[3])
local turn_ms, queue_ms, count, waits = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local turn, ended, own, now = key('turn'), key('ended', caller), caller .. ' ' .. ARGV[3], now_ms()
local tasks, whole, need = {}, 0, 0
for i = 8, #ARGV, 5 do
  local one = {name = ARGV[i], part = tonumber(ARGV[i + 1]), share = tonumber(ARGV[i + 2])}
  one.waited_ms, one.short = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])
  tasks[#tasks + 1], whole = one, whole + one.part
  need = one.name == waits and one.share or need
end

-- Group number k of a task is due when part / whole * total reaches k, and may be taken as soon as
-- that passes k - 1. Whoever always takes what is due first never misses a due moment (Balinski and
-- Young's quota method), so each task stays within one group of its quota.
local function split()
  local left = count
  for _, one in ipairs(tasks) do
    one.credit = number(task, 'credit:' .. one.name) + one.part * count
    one.share = math.max(math.floor(one.credit / whole), 0)
    one.credit = one.credit - one.share * whole
    left = left - one.share
  end
  while left ~= 0 do
    local step, chosen, due = left > 0 and 1 or -1, nil, nil
    for _, one in ipairs(tasks) do
      -- below 0 is left only after a keep that was taken back: the last due go out again
      local own_due = (math.max(step, 0) * whole - one.credit) / one.part
      local may = step > 0 and one.credit > 0 or step < 0 and one.share > 0
      if may and (not chosen or own_due * step < due * step) then
        chosen, due = one, own_due
      end
    end
    chosen.share = chosen.share + step
    chosen.credit = chosen.credit - step * whole
    left = left - step
  end
end

local function account(sign)
  for _, one in ipairs(tasks) do
    add(task, 'credit:' .. one.name, sign * (one.part * count - whole * one.share))
    add(task, 'taken:' .. one.name, sign * one.share)
  end
end

local function note_waits()
  for _, one in ipairs(tasks) do
    add(task, 'waited_ms:' .. one.name, one.waited_ms)
    add(task, 'short:' .. one.name, one.short)
  end
end

-- Nobody may come again, also after a caller that died.
local function expire_unused()
  for _, one in ipairs({task, key('queue', 'turn'), key('needs', 'turn')}) do
    redis.call('PEXPIRE', one, UNUSED_MS)
  end
end

local function end_turn(how)
  redis.call('SET', ended, ARGV[3] .. ' ' .. how, 'PX', ENDED_MS)
  dequeue('turn', caller)
  if redis.call('GET', turn) == own then
    redis.call('DEL', turn)
    redis.call('HDEL', task, 'waits', 'need', 'since')
  end
  if redis.call('EXISTS', turn) == 0 then
    wake('turn', 1, now)
  end
  expire_unused()
end

if verb == 'look' then
  local waited_for = redis.call('EXISTS', turn) == 1 and redis.call('HGET', task, 'waits') or ''
  local told = {waited_for, waited_for ~= '' and now - number(task, 'since') or 0}
  for _, one in ipairs(tasks) do
    for _, figure in ipairs({'taken:', 'short:', 'waited_ms:'}) do
      told[#told + 1] = number(task, figure .. one.name)
    end
  end
  return told
end

begin_writing()
local last, how = string.match(redis.call('GET', ended) or '0 given', '^(%d+) (%a+)$')
local known = tonumber(last) >= operation
local mine = redis.call('GET', turn) == own

if verb == 'keep' then
  if not mine then
    return {known and how == 'kept' and 'ok' or 'lost'}
  end
  account(1)
  note_waits()
  end_turn('kept')
  return {'ok'}
end

if verb == 'give' then
  if not known then
    note_waits()
  elseif tonumber(last) == operation and how == 'kept' then
    account(-1)
  end
  if tonumber(last) <= operation then
    end_turn('given')
  end
  return {'ok'}
end

if verb == 'hold' then
  if mine then
    redis.call('PEXPIRE', turn, turn_ms)
    if waits ~= '' then
      local since = string.format('%.0f', now)
      redis.call('HSET', task, 'waits', waits, 'need', need, 'since', since)
      expire_unused()
    end
  end
  return {mine and 'ok' or 'lost'}
end

split()
local answer = {'turn', '', 0}
for i, one in ipairs(tasks) do
  answer[3 + i] = one.share
end
if known then -- an attempt that comes late
  answer[1] = 'wait'
  return answer
elseif not mine then
  local taken = redis.call('EXISTS', turn) == 1
  if taken or reserved_before('turn', caller, now) > 0 then
    answer[1], answer[2] = 'wait', taken and redis.call('HGET', task, 'waits') or ''
    answer[3] = number(task, 'need')
    if queue_ms > 0 then
      enqueue('turn', caller, 1, queue_ms, now)
    else
      dequeue('turn', caller)
    end
    expire_unused()
    return answer
  end
  dequeue('turn', caller)
  redis.call('HDEL', task, 'waits', 'need', 'since')
end
redis.call('SET', turn, own, 'PX', turn_ms)
return answer
