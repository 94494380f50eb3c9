-- Takes of a mixture run one at a time: the take whose turn it is gets its split among the tasks, and
-- the groups that it keeps are counted.
-- KEYS[1] <prefix>stream of the mixture, a key that never exists
-- ARGV    verb, caller, operation, turn_ms, queue_ms, count, waits,
--         then of each task: name, part, share, waited_ms, short 0|1
--         caller, operation: the take; operations of a caller count up
--         part: the weight of the task is part / sum of parts, whole numbers whose sum is <= 2^32
--         verb: turn   ask for the turn, and queue for queue_ms; 0: leave the queue
--               hold   renew the turn for turn_ms; the take waits for the task `waits`, or '' as before
--               keep   count the groups taken, `share` of each task, and end the turn
--               give   end the turn without groups, or take an earlier keep back
--               look   change nothing
-- Returns of turn: {'turn' | 'wait', task, need, share ...}: the task that the current take waits for, how
--             many of its groups it needs, and the split
--         of hold and keep: {'ok'} | {'lost'}: the turn is another take's; of give: {'ok'}
--         of look: {task that the current take waits for, since how many ms, then of each task: taken,
--             short, waited_ms}
--
-- The hash `task` holds queued, waits, need, since, and of each task credit, taken, short, waited_ms.
-- credit:<task> = part * total - sum of parts * taken: how far the task is behind; all add up to 0.
-- turn holds "<caller> <operation> <deadline>", ended:<caller> "<last operation> kept|given"; both expire.
--@include task clock waiters permissions

local ENDED_MS, UNUSED_MS = 3600000, 2592000000
local verb, caller, operation = ARGV[1], ARGV[2], tonumber(ARGV[3])
local turn_ms, queue_ms, count, waits = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local turn, ended, now = key('turn'), key('ended', caller), now_ms()
local this_take = caller .. ' ' .. ARGV[3]
local noted, deadline = string.match(redis.call('GET', turn) or '', '^(%S+ %d+) (%d+)$')
local holder = noted and tonumber(deadline) > now and noted
local tasks, whole, need = {}, 0, 0
for i = 8, #ARGV, 5 do
  local one = {name = ARGV[i], part = tonumber(ARGV[i + 1]), share = tonumber(ARGV[i + 2])}
  one.waited_ms, one.short = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])
  tasks[#tasks + 1], whole = one, whole + one.part
  need = one.name == waits and one.share or need
end

-- Group number k of a task is due when part / whole * total reaches k, and may be taken as soon as
-- that passes k - 1. Always taking the group that is due first never misses a due moment (Balinski and
-- Young's quota method), so each task stays within one group of its quota.
local function split()
  local left = count
  for _, one in ipairs(tasks) do
    one.credit = number(task, 'credit:' .. one.name) + one.part * count
    one.share = math.max(math.floor(one.credit / whole), 0)
    one.credit = one.credit - one.share * whole
    left = left - one.share
  end
  while left ~= 0 do -- bound: the tasks, as each step gives a group to another task or takes one
    local step, chosen, due = left > 0 and 1 or -1, nil, nil
    for _, one in ipairs(tasks) do
      -- `left` is below 0 only after a keep was taken back: the groups due last are removed
      local its_due = (math.max(step, 0) * whole - one.credit) / one.part
      local may = step > 0 and one.credit > 0 or step < 0 and one.share > 0
      if may and (not chosen or its_due * step < due * step) then
        chosen, due = one, its_due
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

-- The keys expire when the mixture is not used any more.
local function expire_unused()
  for _, one in ipairs({task, key('queue', 'turn'), key('needs', 'turn')}) do
    redis.call('PEXPIRE', one, UNUSED_MS)
  end
end

local function hold_turn()
  redis.call('SET', turn, string.format('%s %.0f', this_take, now + turn_ms), 'PX', UNUSED_MS)
  expire_unused()
end

local function end_turn(how)
  redis.call('SET', ended, ARGV[3] .. ' ' .. how, 'PX', ENDED_MS)
  dequeue('turn', caller)
  if holder == this_take then
    holder = redis.call('DEL', turn) == 0
    redis.call('HDEL', task, 'waits', 'need', 'since')
  end
  if not holder then
    wake('turn', 1, now)
  end
  expire_unused()
end

if verb == 'look' then
  local waited_for = holder and redis.call('HGET', task, 'waits') or ''
  local found = {waited_for, waited_for ~= '' and now - number(task, 'since') or 0}
  for _, one in ipairs(tasks) do
    for _, figure in ipairs({'taken:', 'short:', 'waited_ms:'}) do
      found[#found + 1] = number(task, figure .. one.name)
    end
  end
  return found
end

check_permissions(KEYS[1])
begin_writing()
local last, how = string.match(redis.call('GET', ended) or '0 given', '^(%d+) (%a+)$')
local known = tonumber(last) >= operation
local has_turn = holder == this_take

if verb == 'keep' then
  if not has_turn then
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
  if has_turn then
    set_clock(turn_ms)
    hold_turn()
    if waits ~= '' then
      redis.call('HSET', task, 'waits', waits, 'need', need, 'since', string.format('%.0f', now))
    end
  end
  return {has_turn and 'ok' or 'lost'}
end

split()
local answer = {'turn', '', 0}
for i, one in ipairs(tasks) do
  answer[3 + i] = one.share
end
if known then -- a repeated request that comes late
  return {'wait', unpack(answer, 2)}
end
set_clock(turn_ms)
if not has_turn then
  if holder or reserved_before('turn', caller, now, 0) > 0 then
    answer[1], answer[2] = 'wait', holder and redis.call('HGET', task, 'waits') or ''
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
hold_turn()
return answer
