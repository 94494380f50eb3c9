-- Reads the counters of a task and of its consumer groups, consistently. `report` takes a name and a number.
--@include task clock facts ledger waking

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
  report('makers', redis.call('ZCOUNT', key('makers'), string.format('(%.0f', now_ms()), '(+inf'))
  report('admission:waiting', redis.call('ZCARD', key('queue', '#admission')))
  local makers = {}
  if state.held > 0 then
    makers = redis.call('ZRANGE', key('makers'), 0, PAGE.reported_makers - 1, 'WITHSCORES')
  end
  for i = 1, #makers, 2 do
    local held = redis.call('ZLEXCOUNT', key('holders'), '[' .. makers[i] .. '/', '(' .. makers[i] .. '0')
    if held > 0 then
      report('maker:' .. makers[i], held)
      report('return:' .. makers[i], math.max(0, makers[i + 1] - now_ms()))
    end
  end
end

-- Report the counters of the task. Names that begin with maker: are those of makers that hold rights; those
-- that begin with return: say in how many ms they return if no heartbeat comes. Returns the number of stored
-- groups.
local function report_task(report)
  if redis.call('EXISTS', key('parts')) == 1 then
    report('parts:groups', redis.call('ZCARD', key('part_due')))
    local names = {'waiting', 'bytes', 'begun', 'completed', 'delivered', 'dropped', 'dead', 'repeated',
      'late'}
    for i, counter in ipairs(numbers(key('parts'), unpack(names))) do
      report('parts:' .. names[i], counter)
    end
  end
  local known = numbers(key('parts'), 'sessions', 'turns', 'session_ms')
  if known[1] > 0 then
    local now = server_ms()
    local silent = string.format('%.0f', now + known[3] / 2)
    report('sessions:begun', known[1])
    report('sessions:turns', known[2])
    report('sessions:open', redis.call('ZCOUNT', key('sessions'), string.format('(%.0f', now), '+inf'))
    report('sessions:silent', redis.call('ZCOUNT', key('sessions'), string.format('(%.0f', now), silent))
  end
  if rules().groups_per_version then
    report_rights(report)
  end
  local stored = redis.call('XLEN', stream)
  report('stored', stored)
  local names = {'limit', 'max_bytes', 'version', 'dead_dropped'}
  for i, counter in ipairs(numbers(task, unpack(names))) do
    report(names[i], counter)
  end
  local sums = numbers(puts, 'samples_put', 'bytes_put')
  report('samples_put', sums[1])
  report('bytes_put', sums[2])
  report('dead_letters', redis.call('XLEN', key('dead')))
  report('producers_waiting', redis.call('ZCARD', key('queue', '#room')))
  return stored
end

-- How many takes of a consumer group wait, in all its pools.
local function takes_waiting(group)
  local names, waiting = {}, 0
  for _, status in ipairs(STATUSES) do
    local pool = pool_of(group, status)
    names[#names + 1], names[#names + 2] = key('queue', pool), key('queries', pool)
  end
  if redis.call('EXISTS', unpack(names)) > 0 then
    for _, status in ipairs(STATUSES) do
      waiting = waiting + queued_for(pool_of(group, status))
    end
  end
  return waiting
end

-- Report the counters of a consumer group that has joined. `leased`: groups that it leases; `totals`: the
-- reply of put_totals; `now`: the reply of reported_ms.
local function report_group(report, group, leased, totals, now)
  report('joined', 1)
  local ledger, waiting = ledger_of(group, totals)
  for _, name in ipairs({'put', 'waiting', 'acked', 'expired', 'filtered', 'evicted', 'dead',
    'samples_acked', 'returned', 'taken_over', 'reads'}) do
    report(name, ledger[name] or 0)
  end
  for status, number_of in pairs(waiting) do
    report('waiting_' .. status, number_of)
  end
  report('leased', leased)
  report('consumers', redis.call('ZCOUNT', key('consumers', group), string.format('(%.0f', now), '(+inf'))
  report('consumers_waiting', takes_waiting(group))
end

-- Report the groups that a consumer group would find if it joined.
local function report_found(report, stored)
  report('put', stored)
  report('waiting', stored)
end
