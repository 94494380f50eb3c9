-- The ledger of a consumer group: what became of the groups that it found or that were put since.
--
-- A put changes the counters of the task only. The fields put, filtered and expired of group:<group> hold
-- how far the consumer group's figures are from the task's: it joined later, or expired groups itself.
-- The groups that wait are counted in their pools.
--@include task facts

-- The task's share of a ledger: groups put, filtered, and too stale on arrival. `kept_back` counts groups
-- that were too stale to be sent.
local function put_totals()
  local known = numbers(task, 'filtered', 'kept_back', 'arrived_stale')
  return {put = number(puts, 'put') + known[1] + known[2], filtered = known[1], expired = known[3]}
end

-- Begin the ledger of a consumer group that found no groups yet.
local function begin_ledger(group)
  for name, total in pairs(put_totals()) do
    redis.call('HSET', key('group', group), name, string.format('%d', -total))
  end
end

-- The groups of a consumer group that wait, by status, and their sum; a status without groups is left out.
local function waiting_by_status(group)
  local waiting, others, total = {}, {}, 0
  local function count(status)
    local number_of = redis.call('ZCARD', key('ready', pool_of(group, status)))
    waiting[status], total = number_of > 0 and number_of or nil, total + number_of
  end
  for _, status in ipairs(STATUSES) do
    if status ~= 'completed' then
      others[#others + 1] = key('ready', pool_of(group, status))
    end
  end
  count('completed')
  if redis.call('EXISTS', unpack(others)) > 0 then
    for _, status in ipairs(STATUSES) do
      if status ~= 'completed' then
        count(status)
      end
    end
  end
  return waiting, total
end

local function waiting_in_all_pools(group)
  local _, total = waiting_by_status(group)
  return total
end

-- The counters of a consumer group by name, as numbers; and its waiting groups by status. A caller that has
-- the reply of put_totals gives it.
local function ledger_of(group, totals)
  local ledger, stored = {}, redis.call('HGETALL', key('group', group)) -- bound: one field a counter
  for name, total in pairs(totals or put_totals()) do
    ledger[name] = total
  end
  for i = 1, #stored, 2 do
    ledger[stored[i]] = (ledger[stored[i]] or 0) + tonumber(stored[i + 1])
  end
  local waiting, total = waiting_by_status(group)
  ledger.waiting = total
  return ledger, waiting
end
