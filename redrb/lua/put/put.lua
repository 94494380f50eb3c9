-- Count entries that the same transaction has just added, or take them out again.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    producer, operation, samples, bytes, filtered, expired, revision, status, facts of each entry ...
--         operation: counts up by one a put of this producer; a repeated put is not stored again
--         samples, bytes: of all entries
--         filtered, expired: groups that a filter dropped, or that were too stale to be sent
--         revision: of the settings that the facts were made for; '' fits all
--         status: status of all entries, '' if they have different ones
--         facts: a record as include/facts.lua describes it, packed with cmsgpack
-- Returns {'ok', last seq, room left, groups that were too stale on arrival}: room left is -1 without a limit
--       | {'again', last seq, entries}: an earlier attempt has stored so many entries
--       | {'full', setting}: limit, rate or max_bytes leaves no room
--       | {'never'}: the entries exceed the limits of an empty task
--       | {'gone'}: there is no such task
--       | {'changed'}: the task's settings are not those of the revision
--@include task facts tags pools history capacity waiters waking groups eviction puts
--@include room

begin_writing()
local rule = rules()
if not rule.exists then
  return {'gone'}
end
local producer, operation, count = ARGV[1], tonumber(ARGV[2]), #ARGV - 8
local samples, bytes = tonumber(ARGV[3]), tonumber(ARGV[4])
local filtered, kept_back = tonumber(ARGV[5]), tonumber(ARGV[6])
local known = redis.call('HMGET', puts, producer, 'last', 'put', 'samples_put', 'bytes_put')
local before = find_added(tonumber(known[2] or '0'), count)
local last, put = before + count, tonumber(known[3] or '0')

local again = done_before(known[1], operation)
if again then
  undo(before, count)
  return again
end
if ARGV[7] ~= '' and ARGV[7] ~= rule.revision then
  undo(before, count)
  return {'changed'}
end

local full, left, now = find_room(producer, put, count, bytes)
if full then
  undo(before, count)
  return full
end
if keeps() then
  trim_history(100)
end

-- Groups by the status in which they will wait; groups that are too stale expire at once.
local pools, discarded, stored, notes, stale, bytes_stored = {}, {}, {}, {}, 0, bytes
local current = rule.version and cmsgpack.pack(rule.version) or ''

local function is_overdue(facts)
  local function is_over(version, staleness)
    return version and staleness and rule.version - version > staleness
  end
  return rule.version and facts.status ~= 'expired'
    and (is_over(facts.version, rule.max_staleness) or is_over(facts.newest, rule.max_token_staleness))
end

local function sort_in(status, member, facts, packed)
  local pool = pools[status]
  if not pool then
    pool = {members = {}, facts = {}}
    pools[status] = pool
  end
  pool.members[#pool.members + 1] = member
  pool.facts[#pool.facts + 1] = facts
  stored[#stored + 1], stored[#stored + 2] = member, packed
end

local by_arrival = ARGV[8] ~= '' and rule.order == 'fifo' and #rule.names == 0
  and not (rule.max_staleness or rule.max_token_staleness)
for i = 1, count do
  local member, packed = member_of(before + i), ARGV[8 + i]
  if by_arrival then
    sort_in(ARGV[8], member, ARRIVED, packed .. current)
  else
    local facts = unpack_facts(packed)
    if not is_overdue(facts) then
      sort_in(facts.status, member, facts, packed .. current)
    else
      stale = stale + 1
      if rule.keep then
        facts.status, facts.current = 'expired', rule.version
        notes[member] = expiry_note(rule.version, rule.max_staleness, rule.max_token_staleness)
        sort_in('expired', member, facts, cmsgpack.pack(facts))
      else
        discarded[#discarded + 1] = before + i
        bytes_stored = bytes_stored - facts.size
      end
    end
  end
end

-- Whatever fails from here on, nothing of the put remains.
local function store()
  in_parts('HSET', key('facts'), stored)
  local all = groups()
  if #all == 0 and #rule.names > 0 then
    for _, pool in pairs(pools) do
      number_strings(pool.facts)
    end
  end
  for _, group in ipairs(all) do
    for status, pool in pairs(pools) do
      enter(group, pool_of(group, status), pool.members, pool.facts)
    end
    for member, note in pairs(notes) do
      redis.call('HSET', key('expiries', group), member, note)
    end
    left_unread(group, discarded)
  end
  if rule.max_bytes > 0 then
    add(task, 'bytes', bytes_stored)
  end
  for _, seq in ipairs(discarded) do
    redis.call('XDEL', stream, id_of(seq))
  end
  add(task, 'filtered', filtered)
  add(task, 'kept_back', kept_back)
  add(task, 'arrived_stale', #discarded + kept_back)
  redis.call('HSET', puts, producer, string.format('%d %d %d', operation, last, count),
    'last', string.format('%d', last), 'put', string.format('%d', put + count),
    'samples_put', string.format('%d', (known[4] or 0) + samples),
    'bytes_put', string.format('%d', (known[5] or 0) + bytes))
end
local done, failure = pcall(store)
if not done then
  undo(before, count)
  error(failure)
end

if rule.capacity > 0 then -- a capacity that was given later is reached over several puts
  evict(math.min(stored_groups() - rule.capacity, 100 + count), 0)
end
if rate_of() then -- it may now allow takes of all statuses
  for _, group in ipairs(groups()) do
    wake_pools(group, now)
  end
else
  wake_entered(now)
end
if left >= 0 or rule.max_bytes > 0 then
  dequeue('#room', producer)
  wake_room(now)
end
return {'ok', last, left, stale}
