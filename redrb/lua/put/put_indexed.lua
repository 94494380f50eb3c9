-- Count entries that the same transaction has just added to an indexed task, or take them out again.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    producer, operation, samples, filtered, expired, order, by_token, tags, facts of each entry ...
--         producer, operation, samples: as in put.lua
--         filtered, expired: groups that a filter dropped, or that were too stale to be sent
--         order: name of the order that the scores are for
--         by_token: 1 if the facts hold the version of the newest token
--         tags: names of the tags that the facts may hold, with a space between them
--         facts: a record as include/facts.lua describes it, packed with cmsgpack; its score may be
--         'arrival' or '-arrival', and its tags may be strings
-- Returns what put.lua returns, and with 'ok' the number of groups that were too stale on arrival
--         | {'indexed'}: the arguments were made for other settings than the task's
--         | {'plain'}: run task/convert until it is done
--@include task facts tags pools history capacity waiters groups conversion eviction puts

begin_writing()
local known, gone = numbers(task, 'last', 'limit', 'max_bytes', 'bytes', 'kept_bytes', 'put',
  'samples_put', 'bytes_put', 'capacity')
if gone then
  return {'gone'}
end
local before, limit, max_bytes, stored_bytes = known[1], known[2], known[3], known[4]
local producer, operation, filtered = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local expired, count = tonumber(ARGV[5]), #ARGV - 8
local last = before + count

local again = done_before(producer, operation)
if again then
  undo(before, count)
  return again
end

-- settings that the task was given after this producer had opened it
if ARGV[6] ~= rules().order or (rules().max_token_staleness and ARGV[7] ~= '1')
  or ARGV[8] ~= table.concat(rules().names, ' ') then
  undo(before, count)
  return {'indexed'}
end

if not is_nearly_indexed(groups()) then
  undo(before, count)
  return {'plain'}
end

local now, bytes, entries = now_ms(), 0, {}
for i = 1, count do
  entries[i] = cmsgpack.unpack(ARGV[8 + i])
  bytes = bytes + entries[i].size
end

-- room
local spi, _, least, most = rate_of()
if (limit > 0 and count > limit) or (max_bytes > 0 and bytes > max_bytes)
  or (spi and count > (most - least) / spi) then
  undo(before, count)
  return {'never'}
end
local left, reserved = -1, reserved_before('#room', producer, now)
if limit > 0 then
  left = limit - stored_groups()
  if left < reserved then
    undo(before, count)
    return {'full', 'limit'}
  end
end
if spi then
  local allowed = inserts_left(known[6]) - count
  if allowed < reserved then
    undo(before, count)
    return {'full', 'rate'}
  end
  left = left < 0 and allowed or math.min(left, allowed)
end
if max_bytes > 0 then
  if stored_bytes - known[5] + bytes > max_bytes then
    undo(before, count)
    return {'full', 'max_bytes'}
  end
  free_history(stored_bytes + bytes - max_bytes)
  for i = 1, count do
    redis.call('HSET', key('sizes'), string.format('%.0f', before + i), entries[i].size)
  end
  add(task, 'bytes', bytes)
end
trim_history(100)

if not rules().indexed then
  arriving = count
  index_all(groups())
end
local rule, all = rules(), groups()

-- groups that are too stale on arrival expire at once
local function is_overdue(facts)
  local function is_over(version, staleness)
    return version and staleness and rule.version - version > staleness
  end
  return rule.version
    and (is_over(facts.version, rule.max_staleness) or is_over(facts.newest, rule.max_token_staleness))
end

local stored, stale_ones, pools, discarded, facts_args, notes = 0, 0, {}, {}, {}, {}
for i = 1, count do
  local facts, member = entries[i], member_of(before + i)
  local stale = is_overdue(facts) and facts.status ~= 'expired'
  stale_ones = stale_ones + (stale and 1 or 0)
  if stale and not rule.keep then
    discarded[#discarded + 1] = before + i
  else
    if stale then
      facts.status = 'expired'
      notes[member] = table.concat({rule.version, rule.max_staleness or '-',
        rule.max_token_staleness or '-'}, ' ')
    end
    if facts.score == 'arrival' then
      facts.score = before + i
    elseif facts.score == '-arrival' then
      facts.score = -before - i
    end
    intern(facts.tags or {})
    facts.current = rule.version
    facts_args[#facts_args + 1], facts_args[#facts_args + 2] = member, cmsgpack.pack(facts)
    local pool = pools[facts.status] or {members = {}, facts = {}}
    pools[facts.status] = pool
    pool.members[#pool.members + 1] = member
    pool.facts[#pool.facts + 1] = facts
    stored = stored + 1
  end
end
in_parts('HSET', key('facts'), facts_args)
delete(discarded)

count_put(producer, operation, last, count, {known[6], known[7], known[8]}, tonumber(ARGV[3]), bytes,
  filtered)
add(task, 'arrived_stale', #discarded + expired)
for _, group in ipairs(all) do
  local state = key('group', group)
  for status, pool in pairs(pools) do
    enter(group, pool_of(group, status), pool.members, pool.facts)
  end
  for member, note in pairs(notes) do
    redis.call('HSET', key('expiries', group), member, note)
  end
  redis.call('HSET', state, 'cursor', string.format('%.0f', last))
  add(state, 'put', count + filtered + expired)
  add(state, 'filtered', filtered)
  add(state, 'expired', #discarded + expired)
  left_unread(group, discarded)
  add(state, 'waiting', stored)
end
if known[9] > 0 then -- a capacity that was given later is reached over several puts
  evict(math.min(stored_groups() - known[9], 1000 + count), 0)
end
for _, group in ipairs(all) do
  if spi then -- the rate may now allow takes of other statuses, too
    wake_pools(group, now)
  else
    for status in pairs(pools) do
      wake_pool(pool_of(group, status), now)
    end
  end
end
dequeue('#room', producer)
wake('#room', room_left(), now)
return {'ok', last, left, stale_ones}
