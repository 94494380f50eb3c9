-- The rights of makers to begin groups: how many may be given, and what becomes of them.
--
-- At most (max_staleness + 1) * groups_per_version groups may be begun and not yet trained, counted from
-- `mark`: docs/contributing/decisions/admission.md has the rule and the proof of its bound.
--
-- The hash admission holds `series`, the random name of the rights that it counts; `granted`, the number of
-- the last right; of the rights that have ended, `used`, `returned` and `lost`; `late`, puts with a right
-- that had ended before; `trained`, groups that left the stream because they were acknowledged; `mark`,
-- groups that count as trained for the versions up to the current one; `released`, groups begun beyond the
-- bound, as all would have waited for each other; `stall`, "<since ms> <state>" of such a situation.
--
-- Of the held rights, rights sorts the numbers; right holds "<version or -> <mark> <granted ms> <waiter>"
-- by number; holders has "<waiter>/<number>", all with the score 0; holds the time by which each is taken
-- back. A waiter is "<maker>/<request>". makers holds the deadline of each maker's heartbeat.
--@include task clock facts waiters queries

local STALL_MS = 10000 -- so long nothing goes on before groups are begun beyond the bound
local ROUNDING = 2 -- groups by which a share of batches, such as 22.4, may be late or early

local function most_rights()
  local rule = rules()
  return math.max(1, math.floor((rule.max_staleness + 1) * rule.groups_per_version + 1e-6))
end

-- The numbers by which rights are given; `left` may be negative. Writes nothing.
local function state_of_rights()
  local rule, known = rules(), numbers(key('admission'), 'trained', 'mark', 'granted')
  local state = {trained = known[1], mark = known[1], granted = known[3], most = most_rights(),
    stored = redis.call('XLEN', stream), held = redis.call('ZCARD', key('rights'))}
  if rule.version then -- else no group is stale, and none that was trained counts
    local behind = known[1] - rule.max_staleness * rule.groups_per_version
    state.mark = rule.max_staleness > 0 and math.max(known[2], behind) or known[2]
  end
  local bound, oldest = state.mark, redis.call('ZRANGE', key('rights'), 0, 0)[1]
  if oldest then
    local record = redis.call('HGET', key('right'), oldest)
    local mark, at, waiter = string.match(record, '^%S+ (%S+) (%S+) (.*)$')
    state.oldest_ms, state.oldest_waiter = tonumber(at), waiter
    bound = rule.version and math.min(bound, tonumber(mark)) or bound
  end
  state.left = math.floor(bound + state.most - state.trained - state.held - state.stored + 1e-6)
  return state
end

-- How many more groups takes need than wait for them: the most that the first take of a queue lacks.
local function missing_groups(now)
  local missing = 0
  local function look(queue, waiting)
    each_waiter(queue, now, function(_, need)
      missing = math.max(missing, need - waiting)
      return true
    end)
  end
  for _, group in ipairs(groups()) do
    look(group, redis.call('ZCARD', key('ready', group)))
    local queries = queries_of(group)
    for i = 1, #queries, 2 do
      look(queue_of(group, queries[i]), (state_of_query(queries[i + 1])) or 0)
    end
  end
  return missing
end

-- Begin `missing` groups beyond the bound if nothing has gone on for STALL_MS. Returns the rights left, and
-- the number of those groups.
local function release_stalled(state, missing, now)
  local sign = table.concat({state.trained, state.stored, state.granted, rules().version or '-'}, ' ')
  local since, seen = string.match(redis.call('HGET', key('admission'), 'stall') or '', '^(%d+) (.*)$')
  if seen ~= sign then
    redis.call('HSET', key('admission'), 'stall', string.format('%.0f %s', now, sign))
    return state.left, 0
  elseif now - since < STALL_MS then
    return state.left, 0
  end
  local more = missing - state.left
  redis.call('HSET', key('admission'), 'mark', string.format('%.17g', state.mark + more))
  add(key('admission'), 'released', more)
  state.mark = state.mark + more
  return missing, more
end

-- How many rights may be given to a request that accepts `least` of them, and how many of these were
-- released. If no right is held, and takes wait for more groups than there are, they get what they need.
local function allowed_rights(state, least, now)
  if state.left >= least or state.held > 0 then
    return state.left, 0
  end
  local missing = missing_groups(now)
  if missing <= 0 then
    return state.left, 0
  end
  local left = state.left
  if rules().groups_per_version % 1 > 0 then
    left = math.max(left, math.min(missing, left + ROUNDING))
  end
  if left > 0 then
    return math.max(left, least), 0
  end
  return release_stalled(state, math.max(missing, least), now)
end

-- Wake makers that wait for rights: those for which there are some, or the first one if takes may need its
-- groups.
local function wake_rights(now)
  local first = redis.call('ZRANGE', key('queue', '#admission'), 0, 0)[1]
  if not first then
    return
  end
  now = now or now_ms()
  local state = state_of_rights()
  local available = state.left
  if state.held == 0 and missing_groups(now) > 0 then
    local need = redis.call('HGET', key('needs', '#admission'), first) or '0'
    available = math.max(available, tonumber(string.match(need, '^%d+')))
  end
  wake('#admission', available, now)
end
