-- Reads the counters of a task and of one consumer group, consistently.
--@include task clock facts pools capacity ledger pending waking

local MOST_MAKERS = 100 -- whose rights are reported

-- Report how the rights stand.
local function report_rights(report)
  --@include admission
  local state = state_of_rights()
  local known = numbers(key('admission'), 'used', 'returned', 'lost', 'late', 'released')
  for i, name in ipairs({'used', 'returned', 'lost', 'late', 'released'}) do
    report('admission:' .. name, known[i])
  end
  for _, name in ipairs({'granted', 'held', 'most', 'left'}) do
    report('admission:' .. name, state[name])
  end
  local now = string.format('%d', now_ms())
  report('makers', redis.call('ZCOUNT', key('makers'), '(' .. now, '(+inf'))
  report('admission:waiting', redis.call('ZCARD', key('queue', '#admission')))
  for _, maker in ipairs(redis.call('ZRANGE', key('makers'), 0, MOST_MAKERS - 1)) do
    local held = redis.call('ZLEXCOUNT', key('holders'), '[' .. maker .. '/', '(' .. maker .. '0')
    if held > 0 then
      report('maker:' .. maker, held)
    end
  end
end

-- A flat list name, number, ... of an existing task. Names that begin with maker: are those of makers that
-- hold rights, with their number.
local function figures_of(group)
  local found, now = {}, reported_ms()
  local function report(name, value)
    found[#found + 1] = name
    found[#found + 1] = string.format('%d', value)
  end
  if redis.call('EXISTS', key('parts')) == 1 then
    report('parts:groups', redis.call('ZCARD', key('part_due')))
    local names = {'waiting', 'bytes', 'begun', 'completed', 'delivered', 'dropped', 'dead', 'repeated',
      'late'}
    for i, counter in ipairs(numbers(key('parts'), unpack(names))) do
      report('parts:' .. names[i], counter)
    end
  end
  if rules().groups_per_version and rules().max_staleness then
    report_rights(report)
  end
  local stored = stored_groups()
  report('stored', stored)
  report('archived', redis.call('ZCARD', key('archive')))
  for _, name in ipairs({'limit', 'max_bytes', 'capacity', 'version'}) do
    report(name, number(task, name))
  end
  report('samples_put', number(puts, 'samples_put'))
  report('bytes_put', number(puts, 'bytes_put'))
  report('dead_letters', redis.call('XLEN', key('dead')))
  report('dead_dropped', number(task, 'dead_dropped'))
  report('producers_waiting', redis.call('ZCARD', key('queue', '#room')))
  if redis.call('SISMEMBER', key('groups'), group) == 0 then
    -- if it joined, it would find all stored groups
    report('put', stored)
    report('waiting', stored)
    return found
  end
  report('joined', 1)
  local ledger = ledger_of(group)
  for _, name in ipairs({'put', 'waiting', 'acked', 'expired', 'filtered', 'evicted', 'dead',
    'samples_acked', 'returned', 'taken_over', 'reads'}) do
    report(name, ledger[name] or 0)
  end
  report('leased', count_leased(group))
  report('consumers', redis.call('ZCOUNT', key('consumers', group), '(' .. string.format('%d', now), '(+inf'))
  local queued = 0
  for _, status in ipairs(STATUSES) do
    local pool = pool_of(group, status)
    report('waiting_' .. status, redis.call('ZCARD', key('ready', pool)))
    queued = queued + queued_for(pool)
  end
  report('consumers_waiting', queued)
  return found
end
