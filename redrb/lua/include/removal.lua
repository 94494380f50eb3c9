-- Deletes consumer groups and tasks with all their keys, and wakes who waits for them.
--@include task facts waiters queries ranks

-- Add the names of a consumer group's keys to `names`, its queues to `plain` and `with_query`.
local function add_keys(group, names, plain, with_query)
  for _, kinds in ipairs({TASK_KEYS.group, TASK_KEYS.notes}) do
    for _, kind in ipairs(kinds) do
      names[#names + 1] = key(kind, group)
    end
  end
  for _, status in ipairs(STATUSES) do
    local pool = pool_of(group, status)
    plain[#plain + 1] = pool
    for _, kind in ipairs(TASK_KEYS.pool) do
      names[#names + 1] = key(kind, pool)
    end
    local queries = queries_of(pool)
    for i = 1, #queries, 2 do
      with_query[#with_query + 1] = queue_of(pool, queries[i])
    end
  end
end

-- Wake the first waiters, `most` at most, of queues that are about to be deleted. Returns how many more may
-- be woken.
local function wake_first(queues, most)
  for _, queue in ipairs(queues) do
    local waiters = most > 0 and redis.call('ZRANGE', key('queue', queue), 0, most - 1) or {}
    for _, waiter in ipairs(waiters) do
      send_wake(waiter)
    end
    most = most - math.max(#waiters, 1) -- an empty queue costs a look
  end
  return most
end

-- Delete the keys of consumer groups and those in `names`. Of all their waiters, and of those in
-- `queues`, PAGE.woken_at_end are woken, and all ranks.
local function delete_keys(all, names, queues)
  local with_query = {}
  for _, group in ipairs(all) do
    add_keys(group, names, queues, with_query)
  end
  wake_first(with_query, wake_first(queues, PAGE.woken_at_end))
  for _, group in ipairs(all) do -- ranks ask again, as those that they wait for do
    wake_ranks(group)
  end
  for _, found in ipairs({queues, with_query}) do
    for _, queue in ipairs(found) do
      for _, kind in ipairs(TASK_KEYS.queue) do
        names[#names + 1] = key(kind, queue)
      end
    end
  end
  for first = 1, #names, PAGE.arguments do -- a thread of the server frees their memory
    redis.call('UNLINK', unpack(names, first, math.min(first + PAGE.arguments - 1, #names)))
  end
end

-- Delete the keys of a consumer group.
local function delete_group(group)
  delete_keys({group}, {}, {})
end

-- Delete the keys of the task and of these consumer groups.
local function delete_task(all)
  local names = {}
  for _, kind in ipairs(TASK_KEYS.task) do
    names[#names + 1] = key(kind)
  end
  for _, origin in ipairs(redis.call('HKEYS', key('sources'))) do -- bound: tasks that stages forward from
    names[#names + 1] = key('sources', origin)
  end
  delete_keys(all, names, {'#room', '#admission'})
end
